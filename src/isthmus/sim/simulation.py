"""A workload through the real scheduler in virtual time: arrivals, steps, and a clock that a cost model moves on.

    arrivals until now -> scheduler.schedule -> clock += seconds of that step -> scheduler.settle -> and again

Steps do not overlap: the next one is planned with all that the last one brought. An engine whose steps overlap plans
it one step earlier, so a request may wait a step longer for its first one there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.rows import Int64
from isthmus.engine.sequence import Request
from isthmus.engine.step import Step
from isthmus.memory import Copies, Moves, Pool
from isthmus.params import RequestError, SamplingParams
from isthmus.sim.arrivals import Arrival, Prompts
from isthmus.sim.machine import Machine
from isthmus.sim.planner import Planner
from isthmus.sim.shape import Model, Work
from isthmus.sim.tally import Float64, Tally, add

Walls = Mapping[str, int]
_SAMPLE = 1.0  # seconds between looks at the arena
_OUTPUT = 0  # no prompt has this token
_UNIQUE = 1 << 30  # and none has this one or a later one


@dataclass(frozen=True)
class Setup:
    """What runs the workload."""

    model: Model
    machine: Machine
    arena_bytes: int
    config: SchedulerConfig
    prefix_caching: bool = True
    snapshots: int | None = None  # save states at multiples of so many tokens; None: where the engine does
    max_model_len: int | None = None  # None: the model's
    page_size: int | None = None  # between the boundaries of cached prefixes; None: the token groups'

    @property
    def longest(self) -> int:
        """Tokens of a request at most."""
        return self.max_model_len or self.model.max_model_len


@dataclass(frozen=True)
class Outcome:
    """What came of a workload under one memory."""

    setup: Setup
    walls: Walls | None
    tally: Tally
    steps: int
    refusals: int  # demands of steps that the pool turned away
    computed_tokens: int
    evicted_pages: Mapping[str, int]
    seconds: float  # virtual, from the first arrival to the last token


@dataclass
class Clock:
    """Virtual seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Simulation:
    """One run. `coasting`: take steps that change nothing at once; the result is the same."""

    setup: Setup
    walls: Walls | None = None
    coasting: bool = True
    note: Callable[[int], None] = field(default=lambda requests: None)  # so many more are over
    observe: Callable[[Work, int], None] = field(default=lambda work, firsts: None)
    """Told of every step and how many got their first token in it; not of those that were coasted."""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        setup = self.setup
        self.pool = Pool(setup.arena_bytes, setup.model.groups, walls=self.walls)
        self.planner = Planner(
            self.pool,
            setup.config,
            max_model_len=setup.longest,
            prefix_caching=setup.prefix_caching,
            clock=self.clock,
            page_size=setup.page_size,
            snapshots=setup.snapshots,
            output_token=_OUTPUT,
        )
        self._groups = setup.model.groups
        self._page_bytes = {group.name: group.spec.page_bytes for group in self._groups}
        self._in_row = np.zeros(setup.config.max_num_seqs, np.int64)  # whose request decodes there
        self._next_sample = 0.0
        self._firsts = 0  # requests that have a token

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Everything to its end. Arrivals are in the order of time."""
        tally, prompts, planner, clock = Tally(arrivals), Prompts(), self.planner, self.clock
        self._next_sample = clock.now = arrivals[0].at if arrivals else 0.0
        start, coming = clock.now, 0
        while True:
            while coming < len(arrivals) and arrivals[coming].at <= clock.now:
                self._add(tally, coming, prompts.tokens(arrivals[coming]))
                coming += 1
            if not planner.has_work:
                if coming == len(arrivals):
                    break
                if arrivals[coming].at - clock.now > _SAMPLE:
                    self._sample(tally)
                clock.now = arrivals[coming].at
                continue
            until = min(arrivals[coming].at if coming < len(arrivals) else np.inf, self._next_sample)
            if not (self.coasting and self._coast(tally, until)):
                self._step(tally)
            if clock.now >= self._next_sample:
                self._sample(tally)
        self._sample(tally)
        counters, cache = planner.counters, planner.cache
        return Outcome(
            self.setup,
            self.walls,
            tally,
            counters.steps,
            counters.refusals,
            counters.computed_tokens,
            {} if cache is None else dict(cache.evicted),
            clock.now - start,
        )

    def _add(self, tally: Tally, number: int, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0, max_tokens=tally.arrivals[number].output, ignore_eos=True)
        try:
            self.planner.add(Request(str(number), prompt, params))
        except RequestError as error:
            tally.refused[number] = str(error)
            self.note(1)

    def _coast(self, tally: Tally, until: float) -> bool:
        times = self.planner.coast(self.clock.now, until, self._decode_seconds)
        if not len(times):
            return False
        tally.coasted(self._in_row[self.planner.running.rows], times)
        self.clock.now = float(times[-1])
        return True

    def _decode_seconds(self, past: Int64) -> Float64:
        model, n = self.setup.model, past.shape[-1]
        return self.setup.machine.seconds(model.shape.work(model.groups, past, np.ones(n, np.int64), n))

    def _step(self, tally: Tally) -> None:
        planner = self.planner
        step = planner.schedule()
        assert step is not None, "no step is in flight, so somebody can run"
        past, new = step.past.astype(np.int64), np.diff(step.query_start).astype(np.int64)
        moved, copied = self._moved(step)
        tally.moved_bytes += moved
        tally.copied_bytes += copied
        model = self.setup.model
        work = model.shape.work(model.groups, past, new, len(step.samples), moved + copied)
        self.clock.now += float(self.setup.machine.seconds(work))
        before = self._firsts
        decoding = len(step.samples) == len(past) and bool((past >= planner.running.at.prompt[step.rows]).all())
        if decoding and bool((new == 1).all()):
            self._settle(tally, step, [_OUTPUT] * len(past), self._in_row[step.rows])
        else:
            self._settle_prefill(tally, step)
        self.observe(work, self._firsts - before)

    def _settle_prefill(self, tally: Tally, step: Step) -> None:
        """Some get their first token, which is unlike all others: what follows a prompt is its request's own."""
        samples = list(step.samples)
        tokens = []
        for sample in samples:
            tokens.append(_OUTPUT if sample.output else _UNIQUE + self._firsts)
            self._firsts += not sample.output
        rows = [sample.row for sample in samples]
        self._in_row[rows] = self._settle(tally, step, tokens, None)

    def _settle(self, tally: Tally, step: Step, tokens: list[int], requests: Int64 | None) -> Int64:
        """Take in what was sampled; whose it was."""
        planner = self.planner
        finished = planner.counters.finished
        events = planner.settle(step, tokens)
        if requests is None:
            requests = np.array([int(sequence.request.request_id) for sequence, _ in events], np.int64)
        tally.tokens(requests, self.clock.now)
        if planner.counters.finished > finished:
            for number, (sequence, _) in zip(requests.tolist(), events, strict=True):
                if sequence.finish_reason is not None:
                    self._end(tally, number, sequence.request)
        return requests

    def _end(self, tally: Tally, number: int, request: Request) -> None:
        receipt = request.receipt
        tally.end[number] = self.clock.now
        tally.preemptions[number] = receipt.preemptions
        tally.cached_tokens += receipt.cached_tokens
        tally.known_tokens += receipt.known_tokens
        add(tally.restorable, receipt.restorable)
        add(tally.waited_for, receipt.waited_for)
        if receipt.cut_by is not None:
            add(tally.cut_by, {receipt.cut_by: 1})
        request.sequences.clear()  # they name their request: nobody but the garbage collector would find the prompt
        self.note(1)

    def _moved(self, step: Step) -> tuple[int, int]:
        """Bytes of pages that change their place, and of states that are copied, in this step."""
        moved = copied = 0
        for op in step.delta.ops:
            if isinstance(op, Moves):
                moved += len(op.source) * self._page_bytes[op.group]
            elif isinstance(op, Copies):
                copied += len(op.source) * self._page_bytes[op.group]
        return moved, copied

    def _sample(self, tally: Tally) -> None:
        planner = self.planner
        usage = self.pool.usage({} if planner.cache is None else planner.cache.idle)
        tally.sample(self.clock.now, len(planner.running), len(planner.waiting), usage)
        self._next_sample = self.clock.now + _SAMPLE
