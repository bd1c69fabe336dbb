"""Wrong calls raise at once and leave the pool as it was; the founding bug cannot be written."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import numpy as np
import pytest

import isthmus.memory
from isthmus.memory import Group, Plan, Pool, VirtualPages, opaque_spec
from isthmus.memory.ids import IdSpace, PageTable
from tests.memory.helpers import Traffic, groups_of, live


@pytest.fixture
def pool() -> Pool:
    pool = Pool(400 * 16, groups_of({"state": 20, "window": 3, "full": 2}))
    traffic = Traffic(pool, 3)
    for _ in range(6):
        assert traffic.grant({"state": 1, "full": 6, "window": 4})
    traffic.release(0.3)
    traffic.unbind(0.3)
    pool.take_delta()
    return pool


def state_of(pool: Pool) -> object:
    """Everything a call could have changed."""
    regions = {
        n: (r.lo, r.hi, r.live, r.owner.copy(), dict(r.pins), r.holes.within(0, len(r.owner)))
        for n, r in pool.regions.items()
    }
    ids = {n: (s.free_ids().copy(), s.live_ids().copy(), s.minted) for n, s in pool.spaces.items()}
    return copy.deepcopy((regions, ids, {n: t.entries.copy() for n, t in pool.tables.items()}, len(pool._ops)))


def same(a: object, b: object) -> bool:
    return repr(a) == repr(b)


def bound(pool: Pool, group: str) -> VirtualPages:
    ids = live(pool, pool.groups[group].space)
    return ids[pool.is_bound(group, ids)].view(VirtualPages)


WRONG: dict[str, tuple[Callable[[Pool], object], type[Exception], str]] = {
    "release twice": (lambda p: p.release("tokens", p.spaces["tokens"].free_ids()[-1:]), ValueError, "not live"),
    "release a negative id": (lambda p: p.release("tokens", [-1]), IndexError, "-1"),
    "release id 0": (lambda p: p.release("tokens", [0]), IndexError, "0 is not a virtual page id"),
    "release a foreign id": (lambda p: p.release("states", [10_000]), IndexError, "10000"),
    "release the same id twice in one call": (
        lambda p: p.release("tokens", [*live(p)[:1], *live(p)[:1]]),
        ValueError,
        "twice",
    ),
    "release physical pages": (
        lambda p: p.release("tokens", p.table("full").translate(live(p)[:2])),
        TypeError,
        "physical pages given where virtual",
    ),
    "release floats": (lambda p: p.release("tokens", np.array([1.5])), TypeError, "integers"),
    "unbind a covering group": (lambda p: p.unbind("full", live(p)[:1]), ValueError, "release the ids instead"),
    "unbind what is not bound": (
        lambda p: p.unbind("window", live(p)[~p.is_bound("window", live(p))][:1]),
        ValueError,
        "is not bound",
    ),
    "unbind a dead id": (lambda p: p.unbind("window", p.spaces["tokens"].free_ids()[:1]), ValueError, "not live"),
    "translate out of range": (lambda p: p.table("window").translate([10**6]), IndexError, "group 'window'.*1000000"),
    "translate a negative id": (lambda p: p.table("window").translate([3, -2]), IndexError, "group 'window'.*-2"),
    "ids where physical pages are due": (lambda p: p.owners("full", live(p)), TypeError, "translate"),  # type: ignore[arg-type]
    "unpin ids": (lambda p: p.unpin("full", live(p)[:1]), TypeError, "translate"),  # type: ignore[arg-type]
    "unpin what is not pinned": (
        lambda p: p.unpin("full", p.table("full").translate(live(p)[:1])),
        ValueError,
        "is not pinned",
    ),
    "pin a dead id": (lambda p: p.pin("full", p.spaces["tokens"].free_ids()[:1]), ValueError, "not live"),
    "plan for an unknown group": (lambda p: p.plan({"ful": 1}), ValueError, "names group 'ful'"),
    "plan for fewer than none": (lambda p: p.plan({"full": -1}), ValueError, "0 or more"),
    "commit a refusal": (lambda p: p.commit(p.plan({"full": 10**6})), ValueError, "refusal cannot be committed"),
    "bind too few ids": (
        lambda p: p.commit(p.plan({"full": 2, "window": 2}), {"window": live(p)[:1]}),
        ValueError,
        "1 ids",
    ),
    "bind an id that has a page": (
        lambda p: p.commit(p.plan({"window": 1}), {"window": bound(p, "window")[:1]}),
        ValueError,
        "has a page already",
    ),
    "bind a dead id": (
        lambda p: p.commit(p.plan({"window": 1}), {"window": p.spaces["tokens"].free_ids()[-1:]}),
        ValueError,
        "neither live nor",
    ),
    "bind other ids than the plan's": (
        lambda p: p.commit(p.plan({"full": 1}), {"full": p.spaces["tokens"].free_ids()[-1:]}),
        ValueError,
        "fresh ids",
    ),
    "rebind in a covering group": (
        lambda p: p.rebind("full", live(p)[:1], live(p)[1:2]),
        ValueError,
        "cannot change its id",
    ),
    "rebind onto a page": (
        lambda p: p.rebind("window", bound(p, "window")[:1], bound(p, "window")[1:2]),
        ValueError,
        "without a page",
    ),
    "copy onto itself": (
        lambda p: p.copy("state", live(p, "states")[:1], live(p, "states")[:1]),
        ValueError,
        "none that is both",
    ),
}


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_wrong_call_raises_and_changes_nothing(pool: Pool, case: str) -> None:
    call, error, message = WRONG[case]
    before = state_of(pool)
    with pytest.raises(error, match=message):
        call(pool)
    assert same(state_of(pool), before)
    pool.check()


def test_pinned_pages_are_neither_released_nor_unbound_nor_moved(pool: Pool) -> None:
    ids = bound(pool, "window")
    pages = pool.pin("window", ids[:1])
    pool.pin("window", ids[:1])  # two transfers hold the same page
    before = state_of(pool)
    with pytest.raises(ValueError, match="pinned"):
        pool.release("tokens", ids)
    with pytest.raises(ValueError, match="pinned"):
        pool.unbind("window", ids)
    assert same(state_of(pool), before)
    pool.compact()
    assert np.array_equal(pool.table("window").translate(ids[:1]), pages)
    pool.unpin("window", pages)
    with pytest.raises(ValueError, match="pinned"):
        pool.release("tokens", ids[:1])
    pool.unpin("window", pages)
    pool.release("tokens", ids[:1])
    pool.check()


def test_a_plan_is_good_for_one_commit(pool: Pool) -> None:
    first, second = pool.plan({"full": 1}), pool.plan({"full": 1})
    pool.commit(first)
    with pytest.raises(RuntimeError, match="plan again"):
        pool.commit(second)
    pool.check()


def test_a_window_page_can_be_bound_again(pool: Pool) -> None:
    """What the prefix cache needs: an id whose window page was evicted gets a new one."""
    unbound = live(pool)[~pool.is_bound("window", live(pool))][:2]
    pool.commit(pool.plan({"window": 2}), {"window": unbound})
    assert pool.is_bound("window", unbound).all()
    pool.check()


def test_an_arena_without_room_for_a_null_page_is_refused() -> None:
    with pytest.raises(ValueError, match="null page"):
        Pool(31, groups_of({"full": 2}))
    tiny = Pool(3 * 16, groups_of({"full": 2, "window": 2}))
    assert not tiny.plan({"full": 1, "window": 1})
    tiny.check()


def test_walls_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Pool(100, groups_of({"full": 2, "window": 1}), walls={"full": 64, "window": 32})
    with pytest.raises(ValueError, match="each of"):
        Pool(1000, groups_of({"full": 2, "window": 1}), walls={"full": 64})


# -- the founding bug ---------------------------------------------------------------------------------------------


def churn_until(pool: Pool, id_wanted: int) -> None:
    """Serve short sequences until an id past `id_wanted` is live: a fresh server never sees one."""
    for _ in range(10_000):
        plan = pool.plan({"full": 4, "window": 2})
        assert isinstance(plan, Plan)
        ids = plan.ids["tokens"]
        pool.commit(plan, {"window": ids[2:]})
        if ids.max() > id_wanted:
            return
        pool.release("tokens", ids)
    pytest.fail("ids do not rotate through their space")


def test_a_table_sized_by_its_own_pages_raises_naming_group_and_id() -> None:
    """10:1 pages as in the bug: the window table has 10 times fewer entries than there are ids."""
    pool = Pool(4000 * 16, groups_of({"full": 1, "window": 10}))
    own_pages = pool.num_pages("window")
    table = pool.table("window")
    assert len(table) > own_pages
    table.entries = table.entries[: own_pages + 1]  # what the bug did; nothing public can
    with pytest.raises(IndexError, match=r"group 'window': virtual page id \d+ is outside its page table"):
        churn_until(pool, own_pages)


def test_the_same_churn_is_safe_with_the_table_its_space_makes() -> None:
    pool = Pool(4000 * 16, groups_of({"full": 1, "window": 10}))
    churn_until(pool, pool.num_pages("window"))
    pool.check()


def test_no_public_call_takes_the_length_of_a_table() -> None:
    assert list(inspect.signature(PageTable.__init__).parameters) == ["self", "space", "group"]
    assert list(inspect.signature(IdSpace.table).parameters) == ["self", "group"]
    makers = [
        name
        for name, thing in vars(isthmus.memory).items()
        if inspect.isfunction(thing) and "PageTable" in str(inspect.signature(thing).return_annotation)
    ]
    assert makers == []


def test_every_table_is_as_long_as_its_id_space() -> None:
    sizes = {"state": 1500, "window1": 10, "window2": 2, "full": 1}
    pool = Pool(9000 * 16, groups_of(sizes))
    for name, group in pool.groups.items():
        assert len(pool.table(name)) == pool.ids(group.space).capacity + 1


def test_a_space_without_a_covering_group_of_every_token_uses_its_widest_window() -> None:
    groups = [Group("small", opaque_spec(16), "window", 4), Group("wide", opaque_spec(32), "window", 64)]
    pool = Pool(100 * 16, groups)
    assert pool.covering["tokens"] == ("wide",)
    pool.commit(pool.plan({"wide": 3, "small": 0}))
    pool.check()
