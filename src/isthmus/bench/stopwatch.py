"""Times the parts of engine steps from outside: schedule, launch, and waiting for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from isthmus.engine.core import Engine
from isthmus.engine.step import Executor, Launched, Result, Step

T = TypeVar("T")


class Stopwatch:
    """Seconds of each lap, and of its parts. A lap is one `Engine.step`."""

    def __init__(self, *, cuda: bool) -> None:
        self.wall: list[float] = []
        self.sizes: list[tuple[int, int]] = []  # tokens and sequences of each step that was launched
        self.launched_in: list[int] = []  # the lap of each
        self._cuda = cuda
        self._parts: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Forget what was measured."""
        for measured in (self.wall, self.sizes, self.launched_in, self._parts, self._now, self._events):
            measured.clear()

    def lap(self, seconds: float) -> None:
        """A step ended that took so long."""
        self.wall.append(seconds)
        self._parts.append(self._now)
        self._now = {}

    def host(self) -> dict[str, list[float]]:
        """Seconds on the host by lap: schedule, launch, settle (what is left), and their total."""
        laps = list(zip(self.wall, self._parts, strict=True))
        known = {name: [part.get(name, 0.0) for _, part in laps] for name in ("schedule", "launch")}
        total = [wall - part.get("wait", 0.0) for wall, part in laps]
        settle = [t - s - n for t, s, n in zip(total, known["schedule"], known["launch"], strict=True)]
        return known | {"settle": settle, "total": total}

    def span(self) -> list[float]:
        """Seconds on the stream, by step that was launched."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in self._events]

    def gaps(self) -> list[float]:
        """Seconds for which the stream stood still before each of them."""
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [0.0] * bool(self._events) + [end.elapsed_time(start) * 1e-3 for (_, end), (start, _) in pairs]

    def time(self, part: str, work: Callable[[], T]) -> T:
        """Do something, as a part of this lap."""
        start = time.perf_counter()
        result = work()
        self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - start
        return result

    def launch(self, step: Step, executor: Executor) -> Launched:
        """Launch a step, between two events on the stream."""
        self.sizes.append((len(step.tokens), len(step.rows)))
        self.launched_in.append(len(self.wall))
        if not self._cuda:
            return self.time("launch", lambda: executor.launch(step))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        launched = self.time("launch", lambda: executor.launch(step))
        end.record()
        self._events.append((start, end))
        return _Watched(launched, end, self)


class _Watched:
    """Implements `Launched`: waiting for the device is told from reading the results."""

    def __init__(self, launched: Launched, end: torch.cuda.Event, watch: Stopwatch) -> None:
        self._launched, self._end, self._watch = launched, end, watch

    def wait(self) -> Sequence[Result]:
        self._watch.time("wait", self._end.synchronize)
        return self._launched.wait()


class _WatchedExecutor:
    """Implements `Executor`."""

    def __init__(self, executor: Executor, watch: Stopwatch) -> None:
        self._executor, self._watch = executor, watch

    @property
    def overlaps(self) -> bool:
        return self._executor.overlaps

    def launch(self, step: Step) -> Launched:
        return self._watch.launch(step, self._executor)


@contextlib.contextmanager
def measured(engine: Engine, *, cuda: bool) -> Iterator[Stopwatch]:
    """Meanwhile the engine's parts are timed, on a GPU those on the stream too; whoever steps it calls `lap`."""
    watch = Stopwatch(cuda=cuda)
    executor, scheduler, schedule = engine.executor, engine.scheduler, engine.scheduler.schedule
    engine.executor = _WatchedExecutor(executor, watch)
    vars(scheduler)["schedule"] = lambda: watch.time("schedule", schedule)
    try:
        yield watch
    finally:
        engine.executor = executor
        del vars(scheduler)["schedule"]
