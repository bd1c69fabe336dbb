"""Engines whose memory is checked, and faults planted in them: in what the planner hands out, or in the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.output import CompletionOutput
from isthmus.engine.runner import Runner
from isthmus.engine.sampler import Sampler
from isthmus.engine.sanitizer import GuardedPool
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.step import Executor, Launched, Step
from isthmus.memory import Delta, Group, Op, opaque_spec
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.scripted import Overlapping, ScriptedExecutor
from tests.engine.test_device_runner import GEMMA
from tests.engine.toy_tokenizers import byte_level
from tests.model.families import FAMILIES
from tests.model.harness import tiny

PAGE, ROWS, LONGEST, WINDOW = 4, 6, 96, 16
MODEL: dict[str, Any] = {**GEMMA, "sliding_window": WINDOW}
"""Two window layers and a full one."""

Change = Callable[[Step], Step]


class Inspected(Overlapping):
    """`Overlapping`, around an executor that can be looked into."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.arena = getattr(inner, "arena", None)

    def tables(self) -> Any:
        """As the inner one has them."""
        return self.inner.tables()  # type: ignore[attr-defined]


class Scripted(ScriptedExecutor):
    """The scripted executor, open to looks."""

    arena = None
    _began: set[int]  # stays that it has run

    def follow(self, engine: Engine) -> None:
        """Sequences may start from what others have left: then the tokens of that are taken from the scheduler."""
        self._began = set()

        def restored(row: int, past: int) -> list[int] | None:
            running = engine.scheduler.running
            stay = int(running.at.owner[row])
            if stay in self._began:
                return None
            self._began.add(stay)
            return next(s for s in running if s.row == row).tokens(0, past)

        self.restored = restored

    def tables(self) -> Any:
        """See `mirrors.Open`."""
        return {name: mirror.table for name, mirror in self._mirrors.items()}, self._blocks


class Tampered:
    """Implements `Executor`: what the planner hands out, changed on its way to whoever checks it."""

    def __init__(self, engine: Engine, change: Change) -> None:
        self._inner: Executor = engine.executor
        self._change = change
        engine.executor = self

    @property
    def overlaps(self) -> bool:
        return self._inner.overlaps

    def launch(self, step: Step) -> Launched:
        return self._inner.launch(self._change(step))


def with_ops(step: Step, ops: Sequence[Op]) -> Step:
    """The step with another delta."""
    return dataclasses.replace(step, delta=Delta(list(ops)))


def engine_for(
    model: PreTrainedModel,
    *,
    check: str = "full",
    overlap: bool = False,
    arena_bytes: int = 1 << 17,
    prefix_caching: bool = False,
) -> tuple[Engine, Runner]:
    """A real model over a poisoned arena."""
    layout = derive(model, PAGE, "float32")
    pool = GuardedPool(arena_bytes, layout.groups)
    sampler = Sampler((), layout.vocab_size)
    runner = Runner(model, layout, arena_bytes, pool.capacities, ROWS, sampler, poison=True)
    executor: Any = Inspected(runner) if overlap else runner
    return build(pool, executor, layout.vocab_size, check, prefix_caching), runner


def scripted_engine(
    *, check: str = "full", overlap: bool = False, arena_bytes: int = 1 << 15, prefix_caching: bool = False
) -> tuple[Engine, Scripted]:
    """Full attention, a window and a state, without a model: `tests.engine.scripted`."""
    groups = [
        Group("full", opaque_spec(64, PAGE), "append"),
        Group("window", opaque_spec(160, PAGE), "window", 9),
        Group("state", opaque_spec(208), "state"),
    ]
    pool = GuardedPool(arena_bytes, groups)
    scripted = Scripted(pool, ROWS)
    executor: Any = Inspected(scripted) if overlap else scripted
    engine = build(pool, executor, 97, check, prefix_caching)
    scripted.follow(engine)
    return engine, scripted


def family(name: str) -> PreTrainedModel:
    """A tiny model of `tests.model.families`."""
    model_type, values = FAMILIES[name]
    layers = {"num_hidden_layers": len(values["layer_types"])} if "layer_types" in values else {}
    return tiny(model_type, **{**layers, **values})


def build(
    pool: GuardedPool, executor: Any, vocab_size: int, check: str = "full", prefix_caching: bool = False
) -> Engine:
    """An engine around an executor."""
    return Engine(
        pool,
        executor,
        byte_level(),
        SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=24),
        max_model_len=LONGEST,
        vocab_size=vocab_size,
        prefix_caching=prefix_caching,
        check_memory=check,
    )


def serve(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    max_tokens: int | Mapping[str, int],
    between: Callable[[int], object] | None = None,
    *,
    vanishing: str = "",
) -> dict[str, CompletionOutput]:
    """What comes of requests queued at once, by name. `between` is called before each step with its number, and aborts
    those that are `vanishing`."""
    outputs = {name: CompletionOutput(0) for name in prompts}
    finished = dict.fromkeys(prompts, 0)
    for name, prompt in prompts.items():
        most = max_tokens if isinstance(max_tokens, int) else max_tokens[name]
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
    steps = 0
    while engine.has_work:
        if between is not None:
            between(steps)
        for output in engine.step():
            finished[output.request_id] += output.finished
            for part in output.outputs:
                outputs[output.request_id].merge(part)
        engine.pool.check()
        steps += 1
    assert all(count == (name not in vanishing) for name, count in finished.items()), "every request ends once"
    return outputs


def sequence_of(engine: Engine, name: str) -> Seq:
    """The one sequence of a request."""
    return engine.scheduler.requests[name].sequences[0]


def ids_of(engine: Engine, name: str) -> list[int]:
    """The ids of a running request's columns."""
    row = sequence_of(engine, name).row
    blocks = engine.scheduler.placement.blocks
    columns = np.arange(blocks.columns[row])
    return [int(v) for v in blocks.ids(np.full(len(columns), row), columns)]


def place(engine: Engine, group: str, virtual: int) -> int:
    """The physical page of an id."""
    return int(engine.pool.table(group).entries[virtual])


def in_use(engine: Engine) -> int:
    """Pages that are neither free nor cached nor fenced."""
    usage = engine.pool.usage(engine.scheduler.placement.idle)
    assert engine.sanitizer is not None
    return sum(group.live_pages for group in usage.groups.values()) - sum(engine.sanitizer.fenced_pages.values())
