"""The scheduler over a real pool: right tokens, no leak, progress of the oldest, refusals that change nothing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection

import numpy as np
import pytest

from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.flight import Event
from isthmus.engine.samples import looks_back
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request, Sequence, Status, sequence_seed
from isthmus.engine.step import Executor, Launched, Step
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.params import RequestError, SamplingParams
from tests.engine.scripted import VOCAB, Overlapping, ScriptedExecutor, expected


def groups(page_size: int, *kinds: tuple[str, int]) -> list[Group]:
    """Groups from ("append" | "window:W" | "state", page bytes)."""
    made = []
    for i, (kind, page_bytes) in enumerate(kinds):
        name, _, window = kind.partition(":")
        spec = opaque_spec(page_bytes, 1 if name == "state" else page_size)
        made.append(Group(f"{name}{i}", spec, name, int(window) if window else None))  # type: ignore[arg-type]
    return made


SHAPES = {
    "full": [("append", 64)],
    "full+window": [("append", 64), ("window:9", 160)],
    "full+two windows": [("append", 64), ("window:9", 160), ("window:30", 48)],
    "window alone": [("window:11", 64)],
    "two windows": [("window:5", 160), ("window:23", 64)],
    "equal windows": [("window:9", 160), ("window:9", 64)],
    "full+state": [("append", 64), ("state", 480)],
    "all kinds": [("state", 480), ("window:9", 160), ("append", 64), ("append", 32), ("state", 96)],
    "state alone": [("state", 480)],
}


class World:
    """A scheduler, its executor, and the checks after every operation. `overlap`: steps are launched one ahead."""

    spare = 0  # pages of a window group that a sequence may hold beyond what it reads
    prefix_caching = False

    def __init__(
        self,
        shape: str,
        page_size: int,
        room_for: int,
        length: int,
        seqs: int = 6,
        budget: int = 24,
        *,
        overlap: bool = False,
        eos: Collection[int] = (),
    ) -> None:
        members = groups(page_size, *SHAPES[shape])
        arena = room_for * capacity.peak_bytes({g.name: g for g in members}, length) + 4 * 480
        self.pool = Pool(arena, members)
        self.config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.eos = eos
        self.scheduler = Scheduler(
            self.pool, self.config, max_model_len=length + 1, eos_token_ids=eos, prefix_caching=self.prefix_caching
        )
        self.executor = ScriptedExecutor(self.pool, seqs)
        self.device: Executor = Overlapping(self.executor) if overlap else self.executor
        self.flights: deque[tuple[Step, Launched]] = deque()
        self.requests: list[Request] = []

    def add(self, prompt: int, output: int, **params: object) -> Request:
        rng = random.Random(len(self.requests))
        tokens = [rng.randrange(VOCAB) for _ in range(prompt)]
        request = Request(str(len(self.requests)), tokens, SamplingParams(max_tokens=output, **params))  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.flights)

    def plan(self) -> Step | None:
        """Schedule and launch, if there is anything to do."""
        waits = self.waits_for_a_flight()
        step = self.scheduler.schedule()
        if step is None:
            assert self.flights, "nothing to do, and nothing to wait for"
            self.pool.check()
        else:
            self.check_step(step, oldest=not waits)
            self.flights.append((step, self.device.launch(step)))
        return step

    def land(self) -> list[Event]:
        """Settle the oldest flight."""
        step, launched = self.flights.popleft()
        events = self.scheduler.settle(step, launched.wait())
        self.pool.check()
        return events

    def advance(self) -> None:
        """What an engine does in a step."""
        step = self.plan() if self.scheduler.has_work and len(self.flights) < 2 else None
        if step is None or not self.device.overlaps or len(self.flights) > 1:
            self.land()

    def step(self) -> Step:
        """A step without overlap."""
        assert not self.device.overlaps
        step = self.plan()
        assert step is not None
        self.land()
        return step

    def waits_for_a_flight(self) -> bool:
        """Does the oldest sequence have to sit out until its pending token is here?"""
        oldest = self.oldest()
        return oldest.has_pending and (
            oldest.status is not Status.RUNNING or oldest.is_complete or looks_back(oldest.request.params)
        )

    def oldest(self) -> Sequence:
        live = [s for r in self.scheduler.requests.values() for s in r.sequences if s.status is not Status.FINISHED]
        return min(live, key=lambda s: s.order)

    def check_step(self, step: Step, *, oldest: bool = True) -> None:
        self.pool.check()
        self.check_running()
        assert 1 <= len(step.tokens) <= self.config.max_num_batched_tokens
        assert len(step.rows) == len(set(step.rows.tolist())) <= self.config.max_num_seqs
        if oldest and (
            self.oldest().status is Status.RUNNING or len(self.scheduler.running) < self.config.max_num_seqs
        ):
            assert self.oldest().row in step.rows.tolist(), "the oldest sequence is not in the step"
        for name, group in self.pool.groups.items():
            if group.window is not None:
                span = max(group.window - 1, 1) + group.spec.page_size - 2
                bound = 2 * (span // group.spec.page_size + 1) * len(self.scheduler.running)
                assert self.used_pages(name) <= bound + self.spare * len(self.scheduler.running)

    def check_running(self) -> None:
        """What is kept by row and by age is what the sequences say."""
        running = self.scheduler.running
        at = running.at
        assert [s.order for s in running] == sorted(s.order for s in running)
        assert running.rows.tolist() == [s.row for s in running]
        assert running.past.tolist() == [s.past for s in running]
        assert set(np.flatnonzero(at.owner).tolist()) == {s.row for s in running}
        for request in self.requests:
            for s in request.sequences:
                assert (s.row >= 0) == (s.status is Status.RUNNING)
                assert 0 <= s.past <= s.length
                assert s.status is Status.FINISHED or s.known <= s.length <= len(s.prompt) + s.limit
                assert s.row < 0 or at.begun[s.row] == (s.queued is None)

    def used_pages(self, group: str) -> int:
        """Pages that sequences hold."""
        return self.pool.usage().groups[group].live_pages

    def finish(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.has_work:
                break
            self.advance()
        assert not self.has_work, "the schedule does not end"
        self.assert_empty()

    def assert_empty(self) -> None:
        assert {name: g.live_pages for name, g in self.pool.usage().groups.items() if g.live_pages} == {}
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        self.pool.check()

    def assert_answers(self) -> None:
        for request in self.requests:
            for sequence in request.sequences:
                want = expected(request.prompt_token_ids, sequence.limit)
                end = next((i + 1 for i, token in enumerate(want) if token in self.eos), None)
                if sequence.finish_reason == "abort":
                    want = want[: len(sequence.output)]
                else:
                    assert sequence.finish_reason == ("length" if end is None else "stop")
                assert sequence.output == want[:end]


BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlapped"])


def drain(scheduler: Scheduler, executor: ScriptedExecutor) -> None:
    """Step until nothing is left to do."""
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        scheduler.settle(step, executor.run(step))
        scheduler.pool.check()


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_full_pool_gives_every_request_its_tokens(shape: str, page_size: int, overlap: bool) -> None:
    world = World(shape, page_size, room_for=8, length=120, overlap=overlap)
    for i in range(12):
        world.add(1 + (i * 17) % 70, 1 + (i * 7) % 40)
    world.finish()
    world.assert_answers()


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_pool_for_one_and_a_half_preempts_and_still_finishes_everyone(
    shape: str, page_size: int, overlap: bool
) -> None:
    world = World(shape, page_size, room_for=1, length=80, overlap=overlap)
    for i in range(8):
        world.add(5 + (i * 13) % 40, 40)
    world.finish()
    world.assert_answers()
    if shape in ("full", "full+window"):
        assert world.scheduler.counters.preemptions > 0, "the pool is not tight enough to test anything"


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_with_aborts_and_preemptions(shape: str, seed: int, overlap: bool) -> None:
    rng = random.Random(f"{shape}{seed}")
    page_size = rng.choice([1, 2, 4, 16])
    rows = rng.choice([1, 3, 6])
    world = World(shape, page_size, rng.choice([1, 2, 4]), length=90, seqs=rows, overlap=overlap, eos=[3, 50])
    for _ in range(150):
        draw = rng.random()
        if draw < 0.25:
            penalty = rng.choice([0.0, 0.0, 0.5])
            n = rng.choice([1, 1, 2, 3])
            world.add(rng.randrange(1, 50), rng.randrange(1, 40), n=n, presence_penalty=penalty)
        elif draw < 0.32 and world.requests:
            request = rng.choice(world.requests)
            alive = any(s.status is not Status.FINISHED for s in request.sequences)
            assert world.scheduler.abort(request.request_id) == alive
        elif draw < 0.37 and world.scheduler.running:
            world.scheduler.preempt(rng.choice(world.scheduler.running))
        elif draw < 0.40:
            world.pool.compact()
        elif world.has_work:
            world.advance()
        world.pool.check()
    world.finish()
    world.assert_answers()


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_preempting_everyone_at_every_other_step_changes_no_token(shape: str, overlap: bool) -> None:
    world = World(shape, 4, room_for=6, length=60, overlap=overlap)
    for i in range(5):
        world.add(3 + 7 * i, 12)
    while world.has_work:
        world.advance()
        world.advance() if world.has_work else None
        if sum(len(s.output) for r in world.requests for s in r.sequences) % 3 == 0:
            for sequence in list(world.scheduler.running)[1:]:
                world.scheduler.preempt(sequence)
    world.assert_empty()
    world.assert_answers()


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "in flight"])
@pytest.mark.parametrize("shape", ["all kinds", "two windows"])
def test_abort_gives_back_every_byte_of_every_kind_at_once(shape: str, state: str) -> None:
    world = World(shape, 4, room_for=4, length=120, budget=24)
    request = world.add(60, 20, n=2)
    if state != "waiting":
        for _ in range(1 if state == "prefill" else 10):
            world.step()
    if state == "preempted":
        world.scheduler.preempt(request.sequences[0])
    if state == "in flight":
        world.plan()
    assert world.scheduler.abort(request.request_id)
    world.assert_empty()
    if state == "in flight":
        assert world.land() == []
    assert [s.finish_reason for s in request.sequences] == ["abort", "abort"]
    assert not world.scheduler.abort(request.request_id)
    world.add(30, 5)
    world.finish()


def test_what_a_step_sampled_is_kept_when_its_sequence_was_preempted_meanwhile() -> None:
    world = World("full+window", 4, room_for=2, length=40)
    request = world.add(10, 6)
    world.step()
    world.plan()
    world.scheduler.preempt(request.sequences[0])
    assert [sequence for sequence, _ in world.land()] == request.sequences
    assert len(request.sequences[0].output) == 2
    assert request.sequences[0].past == 0
    world.finish()
    world.assert_answers()


def test_decodes_and_prefill_chunks_share_a_step_within_the_budget() -> None:
    world = World("full+window", 4, room_for=6, length=100, budget=16)
    world.add(4, 30)
    world.step()
    world.add(50, 2)
    mixed = world.step()
    assert sorted((mixed.query_start[1:] - mixed.query_start[:-1]).tolist()) == [1, 15]
    world.finish()
    world.assert_answers()


def test_the_oldest_prefill_goes_on_while_everyone_else_decodes() -> None:
    world = World("full", 4, room_for=8, length=100, seqs=4, budget=4)
    old = world.add(40, 2)
    for _ in range(3):
        world.add(2, 50)
    before = 0
    while True:
        world.step()
        if old.sequences[0].finish_reason is not None:
            break
        now = old.sequences[0].past + len(old.sequences[0].output)
        assert now > before
        before = now
    world.finish()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_longest_that_fits_is_served_and_one_token_more_is_refused(shape: str) -> None:
    world = World(shape, 4, room_for=1, length=61)
    # With a prefix cache, because windows are priced with the boundary it keeps.
    scheduler = Scheduler(world.pool, world.config, max_model_len=10**6, prefix_caching=True)
    if shape in ("state alone", "window alone", "two windows", "equal windows"):
        assert scheduler.longest == 10**6  # what does not grow is never too long
        return
    longest = scheduler.longest
    assert longest >= 61
    with pytest.raises(RequestError, match=f"need [0-9,]+ bytes.*the arena of [0-9,]+.*has {longest + 1:,} tokens"):
        scheduler.add(Request("long", [1] * 20, SamplingParams(max_tokens=longest + 2 - 20)))
    assert not scheduler.has_work
    scheduler.add(Request("fits", [1] * 20, SamplingParams(max_tokens=longest + 1 - 20)))
    executor = ScriptedExecutor(world.pool, 6)
    drain(scheduler, executor)
    assert scheduler.counters.preemptions == 0
    # Nor would more have fitted: unguarded, one token more ends in a pool that is full.
    scheduler.longest += 1
    scheduler.add(Request("more", [1] * 20, SamplingParams(max_tokens=longest + 2 - 20), cache_salt="cold"))
    with pytest.raises(AssertionError, match="does not fit an empty pool"):
        drain(scheduler, executor)


def test_impossible_requests_change_nothing() -> None:
    world = World("full+window", 4, room_for=1, length=50)
    world.add(10, 5)
    with pytest.raises(RequestError, match="is being served already"):
        world.scheduler.add(Request("0", [1], SamplingParams()))
    with pytest.raises(RequestError, match="empty"):
        world.scheduler.add(Request("a", [], SamplingParams()))
    with pytest.raises(RequestError, match="has 51 tokens and max_model_len is 51"):
        world.scheduler.add(Request("b", [1] * 51, SamplingParams()))
    assert list(world.scheduler.requests) == ["0"]
    assert len(world.scheduler.waiting) == 1
    world.finish()
    world.assert_answers()


def test_output_ends_at_max_model_len_and_without_max_tokens_at_what_fits() -> None:
    world = World("full", 4, room_for=1, length=50)
    capped = world.add(40, 500)
    unlimited = world.add(10, None)  # type: ignore[arg-type]
    world.finish()
    assert capped.sequences[0].length == 51
    assert unlimited.sequences[0].length == 51
    assert {s.finish_reason for r in world.requests for s in r.sequences} == {"length"}


def run_with(tokens: list[int], eos: list[int], **params: object) -> Sequence:
    """One request whose model says `tokens` in turn."""
    pool = Pool(1 << 16, groups(4, *SHAPES["full+window"]))
    scheduler = Scheduler(pool, SchedulerConfig(4, 64), max_model_len=100, eos_token_ids=eos)
    request = Request("r", [1, 2, 3], SamplingParams(**params))  # type: ignore[arg-type]
    scheduler.add(request)
    drain(scheduler, ScriptedExecutor(pool, 4, lambda seen: tokens[len(seen) - 3]))
    return request.sequences[0]


@pytest.mark.parametrize(
    ("params", "output", "reason", "stop"),
    [
        ({}, [5, 6, 9], "stop", None),
        ({"ignore_eos": True, "max_tokens": 5}, [5, 6, 9, 7, 9], "length", None),
        ({"stop_token_ids": [6]}, [5, 6], "stop", 6),
        ({"min_tokens": 4}, [5, 6, 9, 7, 9], "stop", None),
        ({"max_tokens": 3}, [5, 6, 9], "stop", None),
        ({"max_tokens": 2}, [5, 6], "length", None),
    ],
)
def test_what_ends_a_sequence(params: dict[str, object], output: list[int], reason: str, stop: int | None) -> None:
    sequence = run_with([5, 6, 9, 7, 9, 8], [9], **params)
    assert (sequence.output, sequence.finish_reason, sequence.stop_reason) == (output, reason, stop)


def test_end_tokens_are_barred_until_min_tokens() -> None:
    world = World("full", 4, room_for=2, length=40)
    world.add(3, 5, min_tokens=2)
    allowed = []
    while world.scheduler.has_work:
        allowed += [sample.allow_eos for sample in world.step().samples]
    assert allowed == [False, False, True, True, True]


def test_sequences_of_a_request_have_seeds_of_their_own() -> None:
    assert sequence_seed(None, 1) is None
    assert len({sequence_seed(seed, i) for seed in range(20) for i in range(5)}) == 100
    world = World("full", 4, room_for=4, length=40)
    request = world.add(3, 2, n=2, seed=7)
    seeds = [sample.seed for sample in world.step().samples]
    assert seeds == [s.seed for s in request.sequences] == [sequence_seed(7, 0), sequence_seed(7, 1)]


def test_a_cap_on_total_tokens_holds_and_everyone_finishes() -> None:
    pool = Pool(1 << 20, groups(4, *SHAPES["full+window"]))
    scheduler = Scheduler(pool, SchedulerConfig(8, 32), max_model_len=100, max_cached_tokens=70)
    with pytest.raises(RequestError, match="the longest sequence that fits has 69 tokens"):
        scheduler.add(Request("long", [1] * 60, SamplingParams(max_tokens=20)))
    executor = ScriptedExecutor(pool, 8)
    for i in range(6):
        scheduler.add(Request(str(i), [i] * 20, SamplingParams(max_tokens=20)))
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        assert pool.usage().groups["append0"].live_pages <= 70 // 4
        scheduler.settle(step, executor.run(step))
    assert scheduler.counters.finished == 6


def test_the_same_traffic_under_walls() -> None:
    members = groups(4, *SHAPES["full+two windows"])
    walls = capacity.best_walls(members, 12_000, [(30, 20)])
    pool = Pool(12_000, members, walls=walls)
    scheduler = Scheduler(pool, SchedulerConfig(8, 32), max_model_len=60)
    executor = ScriptedExecutor(pool, 8)
    requests = [Request(str(i), [i] * 30, SamplingParams(max_tokens=20)) for i in range(10)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, executor)
    assert [r.sequences[0].output for r in requests] == [expected([i] * 30, 20) for i in range(10)]
