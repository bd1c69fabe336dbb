"""Lookups and sharing in the prefix cache, on every combination of kinds, against a brute-force oracle."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.cache import KINDS
from isthmus.cache.names import extend_each
from isthmus.cache.nodes import Nodes
from isthmus.cache.prefix import PrefixCache
from isthmus.memory import Group, Pool, opaque_spec
from tests.cache.life import LARGE, SHAPES, Life, groups_of, prompt, total

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
    assert (
        len({*names(cache, *tokens), *names(cache, 4, 5, 6, 7, 0, 1, 2, 3), *names(cache, 4, 5, 6, 7, 4, 5, 6, 7)}) == 5
    )
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
    with pytest.raises(OverflowError, match="out of bounds for int32"):
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


@pytest.mark.parametrize("shape", SHAPES)
def test_two_that_computed_the_same_in_one_step_end_with_one_set_of_pages(shape: str) -> None:
    life = Life(shape, 4, LARGE)
    first, second, other = life.start(prompt(1, 2)), life.start(prompt(1, 2)), life.start(prompt(1, 3))
    assert life.step_together([first, second, other], 24)
    assert first.ids == second.ids
    if life.cache.roles.chained:
        assert first.ids[:3] == other.ids[:3]
        assert not set(first.ids[3:]) & set(other.ids[3:])
    if life.tokens:
        assert life.pool.ids("tokens").live == len({*first.ids, *other.ids} - {0})


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


def test_a_second_snapshot_of_one_boundary_is_given_back() -> None:
    life = Life("state + append", 4, LARGE)
    row = life.start(prompt(1))
    assert life.step(row, 8)
    for _ in range(2):  # two sequences may both have found it lacking
        plan = life.pool.plan({"state": 1})
        assert life.cache.lacks_snapshot(row.names, 2) == (life.cache.idle["state"] == 0)
        life.pool.commit(plan)
        snapshot = int(np.asarray(plan.ids["states"])[0])  # type: ignore[union-attr]
        life.pool.copy("state", [row.state], [snapshot])
        life.cache.keep(row.names, 2, snapshot)
        life.check()
        assert life.cache.idle["state"] == 1


def test_sequences_that_end_together_give_up_shared_pages_once_each() -> None:
    life = Life("window + append", 4, LARGE)
    life.serve(prompt(1, 2))
    idle = dict(life.cache.idle)
    rows = [life.start(prompt(1, 2)) for _ in range(3)]
    for name in ("window", "full"):
        first = rows[0].passed["window"] if name == "window" else 0
        life.cache.unlock(name, np.concatenate([row.ids[first:] for row in rows]))
    life.rows.clear()
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
    row = life.start(prompt(1))
    assert life.step(row, 12)
    life.cache.unlock("full", np.array(row.ids[:1]))
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        life.cache.unlock("full", np.array(row.ids[:1]))


def test_a_page_of_many_is_named_as_it_would_be_alone() -> None:
    cache = PrefixCache(Pool(1 << 16, groups_of(next(iter(SHAPES)), 4)), 4)
    tokens = np.arange(3 * 12, dtype=np.int32).reshape(3, 12)
    alone, together = [cache.names("a") for _ in tokens], [cache.names("a") for _ in tokens]
    for one, row in zip(alone, tokens, strict=True):
        one.extend(row)
    together[2].extend(tokens[2, :4])
    extend_each(together[:2], tokens[:2, :4])
    for start in (4, 8):
        extend_each(together, tokens[:, start : start + 4])
    assert [names.pages for names in together] == [names.pages for names in alone]
    assert {names.tokens for names in together} == {12}


def test_chains_that_are_made_together_are_those_made_one_by_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        together, single = Nodes(), Nodes()
        for _ in range(4):
            runs = []
            for _ in range(int(rng.integers(1, 4))):
                stem, first = int(rng.integers(3)), int(rng.integers(4))
                pages = [b"%d-%d" % (stem if i < 3 else 10 + int(rng.integers(5)), i) for i in range(8)]
                chain = [b"/".join(pages[: i + 1]) for i in range(8)]
                runs.append((chain, first, first + int(rng.integers(1, 5))))
            first, end = np.array([run[1:] for run in runs]).T
            slots = together.reach_all([chain for chain, _, _ in runs], first, end, 7)
            assert slots.tolist() == [
                single.reach(chain, column, 7) for chain, start, end in runs for column in range(start + 1, end + 1)
            ]
            for nodes in (together, single):
                nodes.page[slots] = 1
            for name in ("parent", "depth", "children", "last"):
                assert np.array_equal(getattr(together, name)[: together.top], getattr(single, name)[: single.top])
            leaves = slots[together.children[slots] == 0]
            for nodes in (together, single):
                nodes.page[nodes.parent[leaves]] = 1
                nodes.page[leaves] = 0
            together.remove(np.unique(leaves))
            for slot in np.unique(leaves).tolist():
                single.prune(slot)
            assert together._slot == single._slot
            assert together._free == single._free
