"""The engine process's loop, in this process: what orders do to the engine, counted in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from isthmus.engine.core import Engine
from isthmus.llm import LLM
from isthmus.params import SamplingParams
from isthmus.server import wire
from isthmus.server.worker import Service

INFO = wire.ModelInfo("tiny", "", None, {}, [], 300, 2048, 2)
GRAPH_BYTES = 7 << 20


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """Two sequences run, memory holds one long one."""
    llm = LLM(
        str(folder), dtype="float32", page_size=4, pool_bytes=300 << 10, max_num_seqs=2, max_num_batched_tokens=8,
        max_total_tokens=1500,
    )  # fmt: skip
    return llm.engine


class OverError(Exception):
    """The loop has done what was to be seen."""


class Loop:
    """`Service.serve` over a pair of sockets; `orders` are sent when a step begins, so they arrive while it runs."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.orders: Callable[[], Sequence[wire.ToEngine]] = list
        self.reports: list[wire.Report] = []
        self._step = engine.step
        monkeypatch.setattr(engine, "step", self._ordered_step)

    def run(self, context: zmq.Context[zmq.Socket[bytes]], *first: wire.ToEngine) -> None:
        """Serve until `orders` raises OverError."""
        with context.socket(zmq.PAIR) as self._front, context.socket(zmq.PAIR) as back:
            self._front.bind("inproc://loop")
            back.connect("inproc://loop")
            self._send(first)
            with pytest.raises(OverError):
                Service(self.engine, INFO, GRAPH_BYTES).serve(back)
            while self._front.poll(0):
                message = wire.decode_to_front(self._front.recv())
                assert isinstance(message, wire.Report)
                self.reports.append(message)

    def _ordered_step(self) -> object:
        self._send(self.orders())
        return self._step()

    def _send(self, orders: Sequence[wire.ToEngine]) -> None:
        for order in orders:
            self._front.send(wire.encode(order))


@pytest.fixture
def loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    yield Loop(engine, monkeypatch)
    assert not engine.has_work
    engine.pool.check()


def live(stats: wire.Stats) -> int:
    return sum(group.live_pages for group in stats.groups)


def submit(name: str, prompt: int, n: int = 1) -> wire.Submit:
    params = SamplingParams(max_tokens=700, temperature=0, ignore_eos=True, n=n)
    return wire.Submit(name, [5] * prompt, params, cache_salt=name)  # with one salt they would share their pages


def waiting(engine: Engine) -> bool:
    return len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 1


def filling(engine: Engine) -> bool:
    """In the middle of the first prompt."""
    stats = engine.pool.usage()
    return sum(group.live_pages for group in stats.groups.values()) > 40


def decoding(engine: Engine) -> bool:
    return any(len(s.output) > 20 for s in engine.scheduler.running)


def preempted(engine: Engine) -> bool:
    return len(engine.scheduler.running) == 1 and len(engine.scheduler.waiting) == 1


STATES = [
    (waiting, [submit("a", 8), submit("b", 8), submit("c", 8)]),
    (filling, [submit("a", 1000)]),
    (decoding, [submit("a", 8)]),
    (decoding, [submit("a", 8, n=2), submit("b", 8)]),
    (preempted, [submit("a", 600), submit("b", 600)]),
]


@pytest.mark.parametrize(("state", "requests"), STATES, ids=["waiting", "prefill", "decoding", "many", "preempted"])
def test_pages_are_back_one_step_after_an_abort_arrived(
    loop: Loop, state: Callable[[Engine], bool], requests: list[wire.Submit]
) -> None:
    """The step that was running when it arrived is the last one the request is in."""
    engine = loop.engine
    arrived: list[int] = []  # steps so far, and pages that were in use

    def orders() -> Sequence[wire.ToEngine]:
        if arrived:
            raise OverError
        if not (engine.scheduler.counters.steps > before and state(engine)):
            return []
        arrived.append(engine.scheduler.counters.steps)
        return [wire.Abort(request.request_id) for request in requests] + [wire.Reset(0)]

    before, loop.orders = engine.scheduler.counters.steps, orders
    with zmq.Context() as context:
        loop.run(context, *requests)
    assert live(loop.reports[-1].stats) > 0, "the step in which they arrived was in the middle of it"
    assert loop.reports[-1].stats.steps == arrived[0] + 1
    assert {report.stats.graph_bytes for report in loop.reports} == {GRAPH_BYTES}
    usage = engine.pool.usage(engine.scheduler.placement.idle)
    assert sum(group.live_pages for group in usage.groups.values()) == 0, "the next step would have begun"
    assert (
        usage.gap
        + usage.null
        + usage.tail
        + sum(g.page_bytes * (g.live_pages + g.cached_pages + g.hole_pages) for g in usage.groups.values())
        == usage.total
    )
