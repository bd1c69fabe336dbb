"""Admission looks ahead: who would cost much to compute again starts only where it can stay."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.room import Room
from isthmus.engine.scheduler import TOGETHER, Scheduler
from isthmus.engine.sequence import Request, Sequence
from isthmus.memory import Pool, Refusal
from isthmus.params import SamplingParams
from tests.engine.test_scheduler import SHAPES, groups

PAGE = 4
EOS = 9
PAGES = 100  # of full attention; a page holds 64 bytes
LONG = (320, 20)  # 85 pages at its end; by the rule it must be able to stay for 320 / 16 = 20 steps


def scheduler_of(
    pool: Pool, cap: int | None = None, *, prefix_caching: bool = False, together: int = TOGETHER
) -> Scheduler:
    return Scheduler(
        pool,
        SchedulerConfig(8, 1024),
        max_model_len=1000,
        eos_token_ids=[EOS],
        max_cached_tokens=cap,
        prefix_caching=prefix_caching,
        together=together,
    )


def tight(bound: str) -> Scheduler:
    """Room for so many pages of full attention, whoever sets the bound."""
    if bound == "arena":
        return scheduler_of(Pool(64 * (PAGES + 1), groups(PAGE, *SHAPES["full"])))
    members, cap = groups(PAGE, *SHAPES["full+window"]), None
    walls: Mapping[str, int] | None = None
    if bound == "wall":
        walls = {"append0": 64 * (PAGES + 2), "window1": 1 << 16}
    else:
        cap = PAGES * PAGE
    return scheduler_of(Pool(1 << 18, members, walls=walls), cap)


BOUNDS = pytest.mark.parametrize("bound", ["arena", "wall", "cap"])


def ask(scheduler: Scheduler, prompt: int, output: int) -> Sequence:
    name = str(scheduler.counters.finished + len(scheduler.requests))
    request = Request(name, [1] * prompt, SamplingParams(max_tokens=output), cache_salt=name)
    scheduler.add(request)
    return request.sequences[0]


def step(scheduler: Scheduler, token: int = 0) -> None:
    planned = scheduler.schedule()
    assert planned is not None
    scheduler.settle(planned, [token] * len(planned.samples))


def used(scheduler: Scheduler) -> dict[str, int]:
    """Pages per group that sequences have."""
    idle = scheduler.placement.idle
    return {name: region.live - idle.get(name, 0) for name, region in scheduler.pool.regions.items()}


def finish(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        step(scheduler)


@BOUNDS
def test_a_long_prompt_does_not_start_where_it_would_be_preempted_soon(bound: str) -> None:
    scheduler = tight(bound)
    others = [ask(scheduler, 16, 40) for _ in range(3)]  # 4 pages each, 14 at the end: 80 + 12 fit now, 85 + 27 never
    ask(scheduler, 4, 4)  # ends before it gets tight
    step(scheduler)
    long = ask(scheduler, *LONG)
    step(scheduler)
    assert long.row < 0
    while any(s.finish_reason is None for s in others):
        step(scheduler)
    finish(scheduler)
    assert scheduler.counters.preemptions == 0


@BOUNDS
def test_a_short_one_may_try(bound: str) -> None:
    scheduler = tight(bound)
    for _ in range(3):
        ask(scheduler, 112, 40)  # 28 pages each, 38 at the end
    step(scheduler)
    short = ask(scheduler, 16, 40)
    step(scheduler)
    assert short.row >= 0, "it fits for a page or two, and costs little to compute again"
    finish(scheduler)


@BOUNDS
def test_what_others_give_back_in_time_counts(bound: str) -> None:
    scheduler = tight(bound)
    for _ in range(3):
        ask(scheduler, 16, 7)  # gone when the long one needs its last pages
    step(scheduler)
    long = ask(scheduler, *LONG)
    step(scheduler)
    assert long.row >= 0
    finish(scheduler)
    assert scheduler.counters.preemptions == 0


def test_limits_that_nobody_reaches_do_not_keep_others_out() -> None:
    scheduler = tight("arena")
    for _ in range(20):
        ask(scheduler, 16, 300)
        for _ in range(5):
            step(scheduler)
        step(scheduler, EOS)
    for _ in range(3):
        ask(scheduler, 16, 40)
    step(scheduler)
    long = ask(scheduler, *LONG)
    step(scheduler)
    assert long.row >= 0, "three that end after six tokens or so will not grow for twenty steps"


def test_a_refusal_says_how_many_pages_are_over_the_cap() -> None:
    scheduler = tight("cap")
    ask(scheduler, 16, 40)
    step(scheduler)  # it has 4 pages
    refusal = scheduler._room.plan({"append0": PAGES - 2, "window1": 0})
    assert isinstance(refusal, Refusal)
    assert "102 pages of tokens would be cached, 2 more than --max-total-tokens allows" in refusal.message
    assert scheduler._room.plan({"append0": PAGES - 4, "window1": 0})


@pytest.mark.parametrize("shape", SHAPES)
def test_who_fits_beside_nobody_runs_when_it_is_the_oldest(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(Pool(1 << 14, groups(PAGE, *SHAPES[shape])))
    monkeypatch.setattr(Room, "fits_ahead", lambda *_: False)
    sequences = [ask(scheduler, 10 * i, 5) for i in (3, 1, 2)]
    while scheduler.has_work:
        step(scheduler)
        unfinished = [s for s in sequences if s.finish_reason is None]
        assert list(scheduler.running) in ([], unfinished[:1]), "a younger one went ahead"
    assert {s.finish_reason for s in sequences} == {"length"}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_outlook_is_what_comes_to_pass(shape: str, prefix_caching: bool) -> None:
    pool = Pool(1 << 20, groups(PAGE, *SHAPES[shape]))
    scheduler = scheduler_of(pool, prefix_caching=prefix_caching, together=1)  # pages come when they are needed
    for prompt in (3, 17, 50):
        ask(scheduler, prompt, 200)
    step(scheduler)
    step(scheduler)  # with states a prompt is cut where its state is kept
    running, placement = scheduler.running, scheduler.placement
    placement.unbind_passed(running.rows, running.past)
    before, past = used(scheduler), running.past.copy()
    moments = np.arange(30)[:, None]
    gains = placement.outlook(placement.held(running.rows, past), past + moments, np.ones((30, 3)))
    for i in range(30):
        planned = scheduler.schedule()
        assert planned is not None
        assert used(scheduler) == {name: before[name] + int(gain[i]) for name, gain in gains.items()}
        scheduler.settle(planned, [0] * len(planned.samples))


@pytest.mark.parametrize("shape", SHAPES)
def test_nobody_is_promised_pages_that_others_share(shape: str) -> None:
    scheduler = scheduler_of(Pool(1 << 20, groups(PAGE, *SHAPES[shape])), prefix_caching=True)
    for i in range(3):
        scheduler.add(Request(str(i), [1] * 40 + [2 + i] * (5 + i), SamplingParams(max_tokens=50)))
        step(scheduler)
    step(scheduler)
    before, rows = used(scheduler), scheduler.running.rows[1:]
    past = scheduler.running.past[1:]
    gains = scheduler.placement.outlook(scheduler.placement.held(rows, past), past[None], np.zeros((1, 2)))
    for name in ("1", "2"):
        scheduler.abort(name)
    for name, left in used(scheduler).items():
        assert left <= before[name] + gains[name][0]
