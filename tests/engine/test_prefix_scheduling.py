"""The scheduler with a prefix cache: the same tokens, every page accounted for, hits where they are due."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np
import pytest
from numpy.typing import NDArray

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.flight import Event
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request, Status
from isthmus.engine.step import Step
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.params import SamplingParams
from tests.engine.scripted import VOCAB
from tests.engine.test_scheduler import BOTH, SHAPES, World

PAGE = 4
Int32 = NDArray[np.int32]
CHAINED = [shape for shape in SHAPES if shape != "state alone"]  # its pages would hold one token


class WarmWorld(World):
    """A world whose sequences may start from what others left."""

    spare = 2  # the boundary that the cache wants kept, before and after a chunk
    prefix_caching = True

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
        super().__init__(shape, page_size, room_for, length, seqs, budget, overlap=overlap, eos=eos)
        self.executor.restored = self.restored
        self.ran: dict[int, tuple[str, int, int]] = {}  # by row: whose run it executed last
        self.hit_tokens = 0

    def restored(self, row: int, past: int) -> list[int] | None:
        """What a row has cached when its sequence runs for the first time since it started; None later."""
        sequence = next(s for s in self.scheduler.running if s.row == row)
        key = (sequence.request.request_id, sequence.index, sequence.request.receipt.preemptions)
        if self.ran.get(row) == key:
            return None
        self.ran[row] = key
        self.hit_tokens += past
        return sequence.tokens(0, past)

    def ask(self, tokens: list[int], output: int, salt: str | None = None, n: int = 1) -> Request:
        params = SamplingParams(max_tokens=output, n=n)
        request = Request(str(len(self.requests)), tokens, params, cache_salt=salt)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def used_pages(self, group: str) -> int:
        assert self.scheduler.cache is not None
        return super().used_pages(group) - self.scheduler.cache.idle[group]

    def check_cache(self) -> None:
        """Every live id is the cache's or one sequence's."""
        cache, placement = self.scheduler.cache, self.scheduler.placement
        assert cache is not None
        private: dict[str, Int32] = {}
        rows = [s.row for s in self.scheduler.running]
        for space in self.pool.spaces:
            if space == "states":
                held = placement._states[rows]
            else:
                held = np.concatenate(
                    [placement.blocks._table[r, : placement.blocks.columns[r]] for r in rows] or [np.zeros(0, np.int32)]
                )
                held = np.setdiff1d(held, cache.ids(space))
            private[space] = held[held > 0]
        cache.check(private)

    def plan(self) -> Step | None:
        step = super().plan()
        self.check_cache()
        return step

    def land(self) -> list[Event]:
        events = super().land()
        self.check_cache()
        return events

    def serve(self) -> None:
        """Until nothing is left to do; what is cached stays."""
        while self.has_work:
            self.advance()

    def assert_empty(self) -> None:
        """What is left is the cache's, and goes when it is reset."""
        cache = self.scheduler.cache
        assert cache is not None
        live = {name: g.live_pages for name, g in self.pool.usage().groups.items()}
        assert live == dict(cache.idle), "pages that nobody will give back"
        self.scheduler.reset_prefix_cache()
        super().assert_empty()


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@BOTH
@pytest.mark.parametrize("shape", CHAINED)
def test_a_repeated_prompt_is_restored_up_to_its_last_boundary(shape: str, overlap: bool) -> None:
    world = WarmWorld(shape, PAGE, room_for=8, length=120, overlap=overlap)
    tokens = prompt(random.Random(1), 41)
    world.ask(tokens, 3)
    world.serve()
    warm = world.ask(tokens, 3)
    world.serve()
    assert warm.receipt.cached_tokens == 40
    assert warm.receipt.cut_by is None
    assert set(warm.receipt.restorable.values()) == {40}
    world.finish()
    world.assert_answers()


@BOTH
@pytest.mark.parametrize("shape", CHAINED)
def test_a_branch_is_restored_from_the_third_prompt_on(shape: str, overlap: bool) -> None:
    """The second prompt finds where it leaves the first; windows and states exist there only afterwards."""
    world = WarmWorld(shape, PAGE, room_for=10, length=160, budget=200, overlap=overlap)
    rng = random.Random(2)
    shared = prompt(rng, 80)
    receipts = []
    for _ in range(3):
        request = world.ask(shared + prompt(rng, 30), 2)
        world.serve()
        receipts.append(request.receipt)
    assert receipts[0].cached_tokens == 0
    assert receipts[1].known_tokens == 80
    assert receipts[2].cached_tokens == 80
    if shape != "full":
        assert receipts[1].cached_tokens < 80
        assert receipts[1].cut_by is not None
    world.finish()
    world.assert_answers()


@BOTH
@pytest.mark.parametrize("shape", CHAINED)
def test_continuations_of_one_request_share_its_prompt(shape: str, overlap: bool) -> None:
    world = WarmWorld(shape, PAGE, room_for=8, length=90, overlap=overlap)
    world.ask(prompt(random.Random(3), 42), 5, n=4)
    world.finish()
    world.assert_answers()
    assert world.hit_tokens == 3 * 40


@BOTH
@pytest.mark.parametrize("shape", CHAINED)
def test_salts_keep_tenants_apart(shape: str, overlap: bool) -> None:
    world = WarmWorld(shape, PAGE, room_for=8, length=90, overlap=overlap)
    tokens = prompt(random.Random(4), 30)
    for salt, cached in ((None, 0), ("a", 0), ("b", 0), ("a", 28)):
        request = world.ask(tokens, 2, salt)
        world.serve()
        assert request.receipt.cached_tokens == cached
    world.finish()


@pytest.mark.parametrize("shape", CHAINED)
def test_a_preempted_sequence_comes_back_to_what_it_left(shape: str) -> None:
    world = WarmWorld(shape, PAGE, room_for=8, length=90)
    world.ask(prompt(random.Random(5), 41), 20)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(world.scheduler.running[0])
    world.finish()
    world.assert_answers()
    assert world.hit_tokens >= 40


@BOTH
@pytest.mark.parametrize("shape", CHAINED)
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_in_pools_of_every_tightness(shape: str, seed: int, overlap: bool) -> None:
    rng = random.Random(f"{shape}{seed}")
    page_size = rng.choice([1, 2, 4, 16])
    rows = rng.choice([1, 3, 6])
    world = WarmWorld(shape, page_size, rng.choice([1, 2, 4]), length=90, seqs=rows, overlap=overlap, eos=[3, 50])
    roots = [prompt(rng, rng.randrange(1, 45)) for _ in range(3)]
    for _ in range(200):
        draw = rng.random()
        if draw < 0.25:
            root = rng.choice(roots)
            tokens = root[: rng.randrange(len(root) + 1)] + prompt(rng, rng.randrange(1, 6))
            world.ask(tokens, rng.randrange(1, 40), rng.choice([None, None, "x"]), n=rng.choice([1, 1, 2, 3]))
        elif draw < 0.32 and world.requests:
            request = rng.choice(world.requests)
            alive = any(s.status is not Status.FINISHED for s in request.sequences)
            assert world.scheduler.abort(request.request_id) == alive
        elif draw < 0.37 and world.scheduler.running:
            world.scheduler.preempt(rng.choice(world.scheduler.running))
        elif draw < 0.39:
            world.pool.compact()
        elif draw < 0.41:
            world.scheduler.reset_prefix_cache()
        elif world.has_work:
            world.advance()
        world.pool.check()
        world.check_cache()
    world.finish()
    world.assert_answers()


@BOTH
def test_hits_do_happen_in_random_traffic_and_pages_are_evicted(overlap: bool) -> None:
    world = WarmWorld("full+window", 4, room_for=2, length=90, overlap=overlap)
    rng = random.Random(0)
    root = prompt(rng, 40)
    for _ in range(40):
        world.ask(root[: rng.randrange(20, 41)] + prompt(rng, 4), 6)
    world.finish()
    world.assert_answers()
    cache = world.scheduler.cache
    assert cache is not None
    assert world.hit_tokens > 400
    assert all(cache.evicted[name] > 0 for name in world.pool.groups)


def test_the_receipt_tells_what_it_waited_for() -> None:
    now = iter(range(10_000))
    world = WarmWorld("full+window", 4, room_for=8, length=90, seqs=1)
    world.scheduler.clock = lambda: float(next(now))
    first, second = world.ask(prompt(random.Random(6), 30), 6), world.ask(prompt(random.Random(7), 30), 6)
    world.finish()
    assert first.receipt.waited_for.keys() == {"queue"}
    assert second.receipt.waited_for.keys() == {"rows"}
    assert second.receipt.waited_seconds == sum(second.receipt.waited_for.values()) > 0
    assert second.receipt.pages["append0"] == -(-35 // 4)
    sizes = {name: group.spec.page_bytes for name, group in world.pool.groups.items()}
    assert second.receipt.bytes == sum(n * sizes[name] for name, n in second.receipt.pages.items())


def test_what_the_next_one_starts_from_is_not_given_up_while_it_waits() -> None:
    """One that decodes grows into a full cache: what nobody wants goes, though it was used later."""
    pool = Pool(64 * 81, [Group("full", opaque_spec(64, PAGE), "append", None)])
    scheduler = Scheduler(pool, SchedulerConfig(8, 2048), max_model_len=1000, prefix_caching=True)

    def ask(name: str, tokens: list[int], output: int) -> Request:
        request = Request(name, tokens, SamplingParams(max_tokens=output))
        scheduler.add(request)
        return request

    def step() -> None:
        planned = scheduler.schedule()
        if planned is not None:
            scheduler.settle(planned, [7] * len(planned.samples))
        pool.check()

    wanted, later = list(range(1000, 1080)), list(range(2000, 2080))
    for name, tokens in (("wanted", wanted), ("later", later)):
        ask(name, tokens, 1)
        while scheduler.has_work:
            step()
    ask("grows", list(range(3000, 3120)), 80)
    step()
    waits = ask("waits", [*wanted, *range(4000, 4130)], 4)
    while waits.sequences[0].status is Status.WAITING:
        step()
    assert waits.receipt.preemptions == 0
    assert waits.receipt.cached_tokens == len(wanted)
