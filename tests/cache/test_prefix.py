"""The prefix cache against a brute-force oracle, on every combination of kinds, under arenas that are too small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cache import KINDS, kind_of
from isthmus.cache.prefix import PrefixCache
from isthmus.memory import Group, Pool, opaque_spec
from tests.cache.life import SHAPES, Life, Row, groups_of, total

LARGE = 4000  # cells: nothing is ever evicted


def prompt(*words: int, tail: int = 0) -> list[int]:
    """Tokens in pieces of 12, so that prompts share prefixes of whole pieces, and `tail` tokens of their own."""
    return [1000 * word + i for word in words for i in range(12)] + [-1 - i for i in range(tail)]


def run(life: Life, tokens: list[int], salt: str | None = None, *, keep: bool = True) -> Row:
    """A sequence that has computed all its tokens in one chunk after the hit, and still runs."""
    row = life.start(tokens, salt)
    assert life.step(row, len(tokens) - row.past)
    if keep:
        life.keep(row)
    return row


# -- lookups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_served_twice_is_restored_up_to_its_last_full_page(shape: str, page_size: int) -> None:
    for length in range(1, 3 * 12 + 2 * page_size):
        life = Life(shape, page_size, LARGE)
        tokens = prompt(1, 2, 3, tail=8)[:length]
        assert life.serve(tokens).columns == 0
        again = life.lookup(tokens)
        assert again.columns * page_size == life.last(tokens)
        assert again.columns == life.expected(tokens, None)[0]
        assert again.cut_by is None
        assert not again.branch
        life.serve(tokens)  # reads every restored page on the device


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_continues_where_its_last_turn_ended(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    tokens = prompt(1, tail=3)
    ended = 0
    for turn in range(5):
        row = life.start(tokens)
        assert row.past == ended
        for cut in (life.last(tokens), len(tokens)):
            assert life.step(row, cut - row.past) if cut > row.past else True
            life.keep(row)
        row.tokens += [50 + turn] * 9  # the answer
        for _ in range(9):
            assert life.step(row, 1)
            if row.past % 4 == 0:
                life.keep(row)
        life.end(row)
        ended = row.past // 4 * 4
        tokens = [*row.tokens, *range(9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_branch_is_found_by_the_second_and_used_by_the_third(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    first, second, third = prompt(1, 2, 3, 4), prompt(1, 2, 5, 4), prompt(1, 2, 0, 5)
    life.serve(first)
    found = life.serve(second)
    assert found.known * 4 == 24
    pure = not (set(SHAPES[shape]) - {"full", "full too"})
    assert found.columns * 4 == (24 if pure else 0)
    assert found.branch * 4 == (0 if pure else 24)
    assert (found.cut_by is None) == pure
    if found.cut_by is not None:
        assert found.per_kind[found.cut_by] == 0
    assert life.lookup(third).columns * 4 == 24


def test_the_kind_that_cut_the_hit_is_named() -> None:
    life = Life("state + window + append", 4, LARGE)
    row = life.start(prompt(1, 2))
    for _ in range(24):
        assert life.step(row, 1)
    life.end(row)  # every window page is there, no snapshot is
    match = life.lookup(prompt(1, 2))
    assert (match.columns, match.known, match.branch) == (0, 5, 5)
    assert match.per_kind == {"full": 20, "window": 20, "state": 0, "state too": 0}
    assert match.cut_by == "state"


def test_salts_share_nothing() -> None:
    life = Life("append", 4, LARGE)
    tokens = prompt(1, 2)
    life.serve(tokens, "one")
    for salt in (None, "", "two", "salt", "one\0"):
        assert life.lookup(tokens, salt).known == 0
    assert life.lookup(tokens, "one").columns == 5
    life.serve(tokens, "")
    assert life.lookup(tokens).known == 0, "no salt is not the empty salt"


def test_names_say_which_tokens_where_and_after_what() -> None:
    pool = Pool(LARGE * 16, groups_of("append", 4))
    cache, other = PrefixCache(pool, 4), PrefixCache(pool, 4)

    def names(cache: PrefixCache, *tokens: int, salt: str | None = None) -> list[bytes]:
        found = cache.names(salt)
        found.extend(tokens)
        return found.pages

    tokens = list(range(8))
    assert names(cache, *tokens) == names(cache, *tokens)
    assert len({*names(cache, *tokens), *names(cache, 4, 5, 6, 7, 0, 1, 2, 3), *names(cache, 4, 5, 6, 7, 4, 5, 6, 7)}) == 5
    assert names(cache, *tokens)[0] != names(other, *tokens)[0], "the key is drawn anew"
    assert names(cache, 1, 0, 0, 0) != names(cache, 256, 0, 0, 0)
    grown = cache.names()
    for token in tokens:  # a remainder is not named before its page is full
        grown.extend(tokens[grown.tokens : token + 1])
    assert grown.pages == names(cache, *tokens)
    # Tokens crafted to read like a page's name followed by its tokens meet nothing.
    known = names(cache, *tokens)
    crafted = [*np.frombuffer(known[0], np.int32).tolist(), *tokens[4:]]
    assert not set(names(cache, *crafted)) & set(known)
    with pytest.raises(Exception, match="format"):
        names(cache, 2**31, 0, 0, 0)


# -- sharing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_that_share_a_prefix_share_its_pages(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    life.serve(prompt(1, 2))
    one, two = life.start(prompt(1, 2)), life.start(prompt(1, 2))
    assert one.past == two.past == 20
    assert one.ids == two.ids
    live = life.pool.usage().live
    assert life.step(one, 4)
    assert life.step(two, 4)
    if life.tokens:
        assert one.ids == two.ids, "the page that both computed became one"
    life.end(one)
    life.end(two)
    pages = total(life.cache.idle, life.pool)
    assert life.pool.usage().live == pages, "when nobody runs, all that is live is evictable"
    assert pages >= live - total(dict.fromkeys(life.states, 2), life.pool)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "state"])
def test_inserting_what_is_there_returns_the_ids_that_are_there(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    first, second = life.start(prompt(1)), life.start(prompt(1))
    assert life.step(first, 12)
    spare = life.pool.ids("tokens").live
    had = {name: life.pool.regions[name].live for name in life.tokens}
    assert life.step(second, 12)  # computes its own three pages, then finds them known
    assert second.ids == first.ids
    assert life.pool.ids("tokens").live == spare
    assert {name: life.pool.regions[name].live for name in life.tokens} == had


def test_a_page_computed_again_hands_its_window_page_to_the_known_one() -> None:
    life = Life("window + append", 4, LARGE)
    life.serve(prompt(1, 2, 3))  # one chunk: only the tail of the window
    known = life.lookup(prompt(1, 2))
    assert (known.columns, known.known) == (0, 5)
    row = life.start(prompt(1, 2))
    assert life.step(row, 20)
    again = life.lookup(prompt(1, 2))
    assert again.columns == 5
    assert row.ids == again.ids.tolist()
    assert life.pool.is_bound("window", again.ids[-2:]).all()


def test_a_cancelled_hit_leaves_nothing_locked() -> None:
    life = Life("state + window + append", 4, LARGE)
    life.serve(prompt(1, 2))
    idle = dict(life.cache.idle)
    match = life.lookup(prompt(1, 2))
    life.cache.acquire(match)
    assert life.cache.idle["full"] == idle["full"] - 5
    assert life.cache.idle["state"] == idle["state"] - 1
    life.cache.check()
    life.cache.cancel(match)
    life.check()
    assert life.cache.idle == idle


def test_a_match_does_not_outlive_an_eviction() -> None:
    life = Life("append", 4, LARGE)
    life.serve(prompt(1, 2))
    match = life.lookup(prompt(1, 2))
    life.cache.reset()
    with pytest.raises(AssertionError, match="match again"):
        life.cache.acquire(match)


@pytest.mark.parametrize("shape", SHAPES)
def test_looking_changes_nothing(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    life.serve(prompt(1, 2))
    before = vars(life.cache._holdings.nodes).copy()
    before = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in before.items()}
    epoch = life.pool._epoch
    life.lookup(prompt(1, 2, 3))
    life.lookup(prompt(4))
    assert life.pool._epoch == epoch
    assert all(np.array_equal(v, before[k]) for k, v in vars(life.cache._holdings.nodes).items())


# -- eviction -----------------------------------------------------------------------------------------------


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
    life, rng = Life(shape, 2, int(1.5 * cells_of(shape, 2, 42))), np.random.default_rng(seed)
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
    for seed in range(12):
        life = crowded(shape, seed)
        rng = np.random.default_rng(seed)
        for _ in range(12):
            demand = dict.fromkeys(life.pool.groups, 0)
            n = int(rng.integers(0, 8))
            for name, group in life.pool.groups.items():
                demand[name] = int(rng.integers(0, 2)) if group.space == "states" else n
            if life.states:
                demand |= dict.fromkeys(life.states, demand[life.states[0]])
            price, before = Asked(life.pool), dict(life.cache.evicted)
            feasible = bool(life.pool.plan(demand)) or bool(life.pool.plan(demand, life.cache.idle))
            assert life.cache.evict(demand, price) == feasible
            life.check()
            gone = {name: life.cache.evicted[name] - before[name] for name in before}
            if not feasible or not any(gone.values()):
                assert not any(gone.values()), "nothing is evicted in vain"
                continue
            evictions += 1
            assert life.pool.plan(demand)
            assert (gone, True) in price.said
            refused = [r for r, answer in price.said if not answer] + [dict.fromkeys(gone, 0)]
            last = max(refused, key=lambda r: total(r, life.pool) if all(r.get(k, 0) <= gone[k] for k in gone) else -1)
            one = {name: gone[name] - last.get(name, 0) for name in gone}  # what the last candidate gave back
            assert max(one.values()) <= 1, f"{gone} was evicted, {last} was known not to suffice"
    assert evictions >= 12


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
    return {name for name, tokens in prompts.items() if life.lookup(tokens).columns * life.page_size == life.last(tokens)}


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


def test_a_long_prefix_outlives_a_short_one_that_was_used_just_after_it() -> None:
    """Both restore points cost the same window and snapshot; the long one saves twelve times the tokens."""
    life = Life("state + window + append", 4, LARGE)
    long, short = prompt(*range(9), tail=1), prompt(9, tail=1)
    life.serve(long)
    life.serve(short)
    prompts = {"long": long, "short": short}
    while len(survivors(life, prompts)) == 2:
        evict_one(life)
    assert survivors(life, prompts) == {"long"}


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


def cells_of(shape: str, page_size: int, length: int) -> int:
    """What a sequence of so many tokens in one chunk needs, with a snapshot, and the null page."""
    groups = groups_of(shape, page_size)
    pages = {g.name: int(kind_of(g).held(np.array([0]), np.array([length]))[0]) + (g.kind == "state") for g in groups}
    return sum(pages[g.name] * g.spec.page_bytes for g in groups) // 16 + max(g.spec.page_bytes for g in groups) // 16


# -- lives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_random_life(shape: str, page_size: int, data: Any) -> None:
    """Any order of calls in an arena that holds two or three sequences; checks and the oracle at every turn."""
    live_random(shape, page_size, data.draw(st.integers(0, 2**31)), data.draw(st.floats(1.0, 4.0)), 25)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_longer_life_hits_and_evicts(shape: str) -> None:
    hits, evicted, refused = np.sum([live_random(shape, 2, seed, 1.5, 60) for seed in range(6)], axis=0)
    assert hits > 5
    assert evicted > 10
    assert refused > 0


def live_random(shape: str, page_size: int, seed: int, room: float, turns: int) -> tuple[int, int, int]:
    """In an arena for so many of the longest prompts. Returns hit columns, evicted pages and refused steps."""
    life, rng = Life(shape, page_size, int(room * cells_of(shape, page_size, 46))), np.random.default_rng(seed)
    hits = refused = 0
    for _ in range(turns):
        act = rng.random()
        if act < 0.35 and len(life.rows) < 4:
            words = rng.integers(0, 2, rng.integers(1, 4))
            tokens, salt = prompt(*words, tail=int(rng.integers(0, 9))), None if rng.random() < 0.8 else "other"
            match = life.lookup(tokens, salt)
            columns, per_kind = life.expected(tokens, salt)
            assert match.columns == columns
            assert match.per_kind == per_kind
            hits += columns
            life.start(tokens, salt)
        elif act < 0.8 and life.rows:
            row = life.rows[int(rng.integers(len(life.rows)))]
            left = len(row.tokens) - row.past
            if not left:
                row.tokens.append(int(rng.integers(0, 3)))
                left = 1
            n = int(rng.integers(1, left + 1))
            if rng.random() < 0.5:
                n = max(1, (row.past + n) // page_size * page_size - row.past)  # to a boundary
            if not life.step(row, n):
                refused += 1
                life.end(life.rows[-1])  # preempt the youngest
            elif rng.random() < 0.6:
                life.keep(row)
        elif act < 0.9 and life.rows:
            row = life.rows[int(rng.integers(len(life.rows)))]
            if rng.random() < 0.7:
                life.keep(row)
            life.end(row)
        elif act < 0.97:
            most = int(rng.integers(1, 12))
            life.cache.evict({name: most for name in life.tokens} or dict.fromkeys(life.states, 1))
        else:
            life.cache.reset()
        life.check()
    return hits, sum(life.cache.evicted.values()), refused


# -- doors --------------------------------------------------------------------------------------------------


def test_the_page_size_must_be_that_of_the_groups() -> None:
    pool = Pool(1600, [Group("full", opaque_spec(32, 8), "append")])
    with pytest.raises(ValueError, match="'full' has 8 tokens a page, the prefix cache 4"):
        PrefixCache(pool, 4)


def test_every_registered_kind_stands_in_a_shape() -> None:
    kinds = {group.kind for shape in SHAPES for group in groups_of(shape, 4)}
    assert kinds == set(KINDS)


def test_an_id_is_unlocked_once() -> None:
    life = Life("append", 4, LARGE)
    row = run(life, prompt(1))
    life.cache.unlock("full", np.array(row.ids[:1]))
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        life.cache.unlock("full", np.array(row.ids[:1]))
