"""What is evicted, in which order, how much of it, and what never is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from isthmus.memory import Pool
from tests.cache.life import LARGE, SHAPES, Life, cells_of, prompt, total


class Asked:
    """A price that remembers what it was asked and what it said."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.said: list[tuple[dict[str, int], bool]] = []

    def __call__(self, demand: Mapping[str, int], release: Mapping[str, int]) -> bool:
        answer = bool(self.pool.plan(demand, release))
        self.said.append((dict(release), answer))
        return answer


def crowded(shape: str, seed: int) -> Life:
    """A small arena full of the remains of many requests, and one that runs."""
    life, rng = Life(shape, 2, 20 + int(1.5 * cells_of(shape, 2, 42))), np.random.default_rng(seed)
    for _ in range(12):
        tokens = prompt(*rng.integers(0, 3, rng.integers(1, 4)), tail=int(rng.integers(0, 6)))
        row = life.start(tokens)
        while row.past < len(tokens) and life.step(row, int(rng.integers(1, len(tokens) - row.past + 1))):
            if rng.random() < 0.5:
                life.keep(row)
        life.keep(row)
        life.end(row)
    tokens = prompt(0, 1)
    row = life.start(tokens)
    life.step(row, len(tokens) - row.past)
    return life


@pytest.mark.parametrize("shape", SHAPES)
def test_eviction_stops_exactly_where_the_plan_begins_to_exist(shape: str) -> None:
    evictions = 0
    for seed in range(10):
        life = crowded(shape, seed)
        feasible, n = True, 0
        while feasible:
            n += 1
            states = 1 + (n > 4) if life.tokens else n
            demand = {name: states if name in life.states else n for name in life.pool.groups}
            price, before = Asked(life.pool), dict(life.cache.evicted)
            there = bool(life.pool.plan(demand))
            feasible = there or bool(life.pool.plan(demand, life.cache.idle))
            assert life.cache.evict(demand, price) == feasible
            life.check()
            gone = {name: life.cache.evicted[name] - before[name] for name in before}
            if there or not feasible:
                assert not any(gone.values()), "nothing is evicted in vain"
                continue
            evictions += 1
            assert life.pool.plan(demand)
            refused = [r for r, answer in price.said if not answer and all(r.get(k, 0) <= gone[k] for k in gone)]
            last = max(refused, key=lambda r: total(r, life.pool))
            one = {name: gone[name] - last.get(name, 0) for name in gone}  # what the last candidate gave back
            assert max(one.values()) == 1, f"{gone} was evicted, {last} was known not to suffice"
    assert evictions >= 10


def test_pages_for_states_come_from_tokens_and_pages_for_tokens_from_states() -> None:
    life = Life("state + append", 1, 60)
    while life.pool.plan({"full": 13, "state": 2}):
        life.serve(prompt(len(life.cache)))
    demand = {"full": 0, "state": 4}
    assert not life.pool.plan(demand)
    before = dict(life.cache.evicted)
    assert life.cache.evict(demand)
    assert life.cache.evicted["full"] > before["full"]
    life.check()
    life = Life("state + append", 1, 60)
    for word in range(3):  # many snapshots on few tokens
        row = life.start(prompt(word)[:2])
        for _ in range(2):
            assert life.step(row, 1)
            life.keep(row)
        life.end(row)
    assert life.cache.idle["state"] >= 5
    most = max(n for n in range(60) if life.pool.plan({"full": n}, life.cache.idle))
    assert life.cache.evict({"full": most})
    assert life.cache.evicted["state"] > 0
    life.check()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_sequence_uses_is_not_evicted(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    life.serve(prompt(1, 2))
    row = life.start(prompt(1, 2, 3))
    life.serve(prompt(4, 5))
    used = list(row.ids)
    everything = {name: life.pool.num_pages(name) for name in life.pool.groups}
    assert not life.cache.evict(everything)
    assert not any(life.cache.evicted.values()), "nothing is evicted in vain"
    life.cache.reset()
    life.check()
    assert row.ids == used
    assert life.lookup(prompt(4, 5)).known == 0
    assert life.step(row, 36 - row.past)  # reads all of it on the device


def test_window_pages_that_no_running_sequence_sees_are_evicted_while_their_ids_are_in_use() -> None:
    life = Life("window + append", 4, LARGE)
    row = life.start(prompt(1, 2, 3))
    for _ in range(36):
        assert life.step(row, 1)
    assert life.pool.regions["window"].live == 9
    life.cache.reset()
    life.check()
    assert life.pool.regions["full"].live == 9
    assert life.pool.regions["window"].live == row.past // 4 - row.passed["window"] == 3
    row.tokens += [0]
    assert life.step(row, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_reset_gives_back_every_byte_when_nobody_runs(shape: str) -> None:
    life = Life(shape, 2, LARGE)
    for words in ((1, 2), (1, 3), (4,), (1, 2, 5)):
        life.serve(prompt(*words, tail=3), chunks=[5, 12, 20])
    assert life.pool.usage().live
    life.cache.reset()
    life.check()
    assert life.pool.usage().live == 0
    assert len(life.cache) == 0
    assert total(life.cache.evicted, life.pool) > 0


def survivors(life: Life, prompts: Mapping[str, list[int]]) -> set[str]:
    return {
        name for name, tokens in prompts.items() if life.lookup(tokens).columns * life.page_size == life.last(tokens)
    }


@pytest.mark.parametrize("shape", ["append", "window + append", "state + window + append", "windows", "state"])
def test_of_equals_the_least_recently_used_goes(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    prompts = {str(word): prompt(word, tail=1) for word in range(6)}
    for tokens in prompts.values():
        life.serve(tokens)
    for name in "03":  # used again
        life.serve(prompts[name])
    order = "124503"
    while life.cache.idle and any(life.cache.idle.values()):
        alive = survivors(life, prompts)
        assert alive == set(order[len(order) - len(alive) :])
        evict_one(life)
    assert not survivors(life, prompts)


def evict_one(life: Life) -> None:
    """Ask for the least that has to be evicted for."""
    evicted = sum(life.cache.evicted.values())
    life.cache.evict({}, lambda _, release: sum(release.values()) > 0)
    life.check()
    assert sum(life.cache.evicted.values()) > evicted


@pytest.mark.parametrize("shape", ["state + window + append", "state + window of one", "state"])
def test_a_long_prefix_outlives_a_short_one_that_was_used_just_after_it(shape: str) -> None:
    """Both restore points cost the same window and snapshot; the long one saves nine times the tokens."""
    life = Life(shape, 4, LARGE)
    long, short = prompt(*range(9), tail=1), prompt(9, tail=1)
    life.serve(long)
    life.serve(short)
    prompts = {"long": long, "short": short}
    while len(survivors(life, prompts)) == 2:
        evict_one(life)
    assert survivors(life, prompts) == {"long"}


def test_a_long_prefix_that_nobody_asked_for_in_a_long_time_goes_before_a_short_one() -> None:
    life = Life("state + window + append", 4, LARGE)
    prompts = {"long": prompt(*range(9), tail=1), "short": prompt(9, tail=1)}
    for name in ("long", *["short"] * 40):
        life.serve(prompts[name])
    while len(survivors(life, prompts)) == 2:
        evict_one(life)
    assert survivors(life, prompts) == {"short"}


def test_what_counts_is_what_is_saved_beyond_the_restore_point_above() -> None:
    """The end of `deep` saves 12 tokens over the point before it, that of `other` 24 tokens over nothing."""
    life = Life("state + window + append", 4, LARGE)
    prompts = {"deep": prompt(*range(9), tail=1), "above": prompt(*range(8), tail=1), "other": prompt(11, 12, tail=1)}
    life.serve(prompts["deep"], chunks=[96])
    life.serve(prompts["other"])
    while len(survivors(life, prompts)) == 3:
        evict_one(life)
    assert survivors(life, prompts) == {"above", "other"}


def test_a_ranking_is_made_anew_when_much_was_used_since() -> None:
    life = Life("window + append", 1, LARGE)
    life.serve(prompt(1, 2))
    evict_one(life)  # ranks what there is, and takes the one page that no restore point needs
    assert life.cache.evicted == {"full": 0, "window": 1}
    row = life.start(prompt(3, 4, 5, 6, 7, 8))
    for n in (7, *[1] * 65):  # leaves window pages that no restore point needs
        assert life.step(row, n)
    life.keep(row)
    life.end(row)
    evict_one(life)
    assert life.cache.evicted == {"full": 0, "window": 2}
    assert life.lookup(prompt(1, 2, tail=1)).columns == 24


def test_window_pages_that_no_restore_point_needs_go_first() -> None:
    life = Life("window + append", 4, LARGE)
    row = life.start(prompt(1, 2, 3, 4))
    for n in (24, *[1] * 24):  # decodes leave a window page for every column
        assert life.step(row, n)
    life.keep(row)
    life.end(row)
    needless = life.pool.regions["window"].live - 2  # the end needs the last two: 6 tokens back
    assert needless > 3
    for _ in range(needless):
        evict_one(life)
    assert life.cache.evicted == {"full": 0, "window": needless}
    assert life.lookup(prompt(1, 2, 3, 4, 5)).columns == 12
    evict_one(life)
    assert life.lookup(prompt(1, 2, 3, 4, 5)).columns == 0


def test_a_stretch_that_leads_nowhere_goes_after_its_end_as_one() -> None:
    """When the end of a chain is gone, pages that lead to no other restore point are worth nothing."""
    life = Life("window + append", 4, LARGE)
    prompts = {"first": prompt(1, 2, 3, tail=1), "second": prompt(4, 5, 6, 7, tail=1)}
    for tokens in prompts.values():
        life.serve(tokens)
    while survivors(life, prompts) == {"first", "second"}:
        evict_one(life)
    while life.lookup(prompts["first"]).known:
        assert survivors(life, prompts) == {"second"}
        evict_one(life)
    assert survivors(life, prompts) == {"second"}


def test_a_ranking_passes_over_what_was_used_since() -> None:
    life = Life("append", 4, LARGE)
    prompts = {str(word): prompt(word, tail=1) for word in range(8)}
    for tokens in prompts.values():
        life.serve(tokens)
    evict_one(life)  # ranks: 0 goes first, then 1, ...
    life.serve(prompts["1"])
    row = life.start(prompts["2"])
    while "3" in survivors(life, prompts):
        evict_one(life)
    assert {"1", "2", "4"} <= survivors(life, prompts)
    assert life.step(row, 1)
