"""A plan exists if and only if the bytes can be arranged: every answer against an enumeration of arrangements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from isthmus.memory import Pool, Refusal
from tests.memory.helpers import Traffic, Twin, groups_of

SHAPES = {
    "one group": ({"full": 3}, None),
    "two ends 2:1": ({"full": 2, "window": 1}, None),
    "two ends 1:3": ({"full": 1, "window": 3}, None),
    "state and full": ({"state": 5, "full": 2}, None),
    "wide high end": ({"state": 1, "full": 5}, None),
    "one float": ({"state": 4, "window": 3, "full": 2}, None),
    "two floats": ({"state": 3, "window1": 2, "window2": 1, "full": 1}, None),
    "two states": ({"state1": 3, "state2": 2, "full": 1}, None),
    "windows only": ({"window1": 3, "window2": 2}, None),
    "walls": ({"full": 2, "window": 3}, {"full": 9, "window": 11}),
    "walls and state": ({"state": 3, "full": 1, "window": 2}, {"full": 5, "window": 7, "state": 8}),
}


def arrangement_exists(pool: Pool, demand: Mapping[str, int], cells: int) -> bool:
    """Enumerate, region by region, every span on every page grid. Shares no code with the planner."""
    null = max(g.spec.page_bytes for g in pool.groups.values()) // 16
    names = list(pool.groups)
    need = {n: pool.regions[n].live + demand.get(n, 0) for n in names}
    pins = {n: sorted(pool.regions[n].pins) for n in names}
    size = {n: pool.groups[n].spec.page_bytes // 16 for n in names}

    def options(name: str, lo: int, hi: int, anchor: str) -> list[tuple[int, int]]:
        found = []
        usable = [p for p in range(cells) if p * size[name] >= lo and (p + 1) * size[name] <= hi]
        if need[name] == 0:
            return [(0, 0)]
        for i in range(len(usable)):
            for j in range(i, len(usable)):
                a, b = usable[i], usable[j] + 1
                if (anchor == "low" and i != 0) or (anchor == "high" and j != len(usable) - 1):
                    continue
                if b - a >= need[name] and all(a <= p < b for p in pins[name]):
                    found.append((a * size[name], b * size[name]))
        return found

    if pool.walls is not None:
        lo = null
        for name in names:
            hi = lo + pool.walls[name] // 16
            if not options(name, lo, hi, "low"):
                return False
            lo = hi
        return True

    def place(i: int, edge: int) -> bool:
        if i == len(names):
            return True
        anchor = "low" if i == 0 else "high" if i == len(names) - 1 else "float"
        for a, b in options(names[i], null, cells, anchor):
            if (a == b or a >= edge) and place(i + 1, max(edge, b)):
                return True
        return False

    return place(0, null)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pins", [False, True], ids=["", "pins"])
def test_plan_exists_exactly_when_an_arrangement_does(shape: str, pins: bool) -> None:
    sizes, walls = SHAPES[shape]
    answers = {True: 0, False: 0}
    for seed in range(12):
        rng = np.random.default_rng(seed)
        cells = int(rng.integers(16, 34)) if walls is None else 26
        pool = Pool(cells * 16, groups_of(sizes), walls=walls and {n: u * 16 for n, u in walls.items()})
        traffic, twin = Traffic(pool, seed, pins=pins), Twin(pool)
        for _ in range(40):
            want = traffic.demand(4)
            expected = arrangement_exists(pool, want, cells)
            assert pool.could(want) == expected
            back = {name: region.live // 3 for name, region in pool.regions.items()}
            assert pool.could(want, back) == bool(pool.plan(want, back))
            assert traffic.grant(want) == expected, f"seed {seed}: {want} in {pool.usage()}"
            answers[expected] += 1
            if rng.random() < 0.5:
                traffic.release(0.4)
            if rng.random() < 0.5:
                traffic.unbind(0.4)
            if pins and rng.random() < 0.5:
                traffic.pin()
            pool.check()
            twin.apply(pool.take_delta())
            twin.verify()
    assert min(answers.values()) >= 20, f"the traffic must meet both answers, got {answers}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_empty_pool_is_exact_for_every_mix_of_kinds(shape: str) -> None:
    """An end that holds nothing must not keep its neighbours off the bytes beyond its page grid."""
    sizes, walls = SHAPES[shape]
    rng = np.random.default_rng(0)
    for _ in range(300):
        cells = int(rng.integers(8, 24)) if walls is None else 26
        pool = Pool(cells * 16, groups_of(sizes), walls=walls and {n: u * 16 for n, u in walls.items()})
        want = Traffic(pool, int(rng.integers(2**31))).demand(9)
        for space in pool.spaces:
            if rng.random() < 0.4:
                want |= {name: 0 for name, group in pool.groups.items() if group.space == space}
        expected = arrangement_exists(pool, want, cells)
        assert pool.fits(want) == expected, f"{want} in {cells} cells"
        assert bool(pool.plan(want)) == expected


def test_a_plan_moves_nothing_when_today_spans_serve() -> None:
    pool = Pool(100 * 16, groups_of({"state": 5, "window": 2, "full": 1}))
    traffic = Traffic(pool, 0)
    for _ in range(8):
        assert traffic.grant({"state": 1, "window": 1, "full": 2})
    traffic.release(0.5)
    before = dict(pool.moved_pages)
    assert traffic.grant({"state": 1, "window": 1, "full": 2})
    assert pool.moved_pages == before


def test_the_cheapest_neighbour_is_moved() -> None:
    """The window float must give way or the state end must close a hole of 5 cells: the float is cheaper."""
    pool = Pool(40 * 16, groups_of({"state": 5, "window": 1, "full": 1}))
    states = [pool.plan({"state": 1}) for _ in range(1)]
    for _ in range(4):
        plan = pool.plan({"state": 1})
        pool.commit(plan)
    del states
    pool.release("states", pool.ids("states").live_ids()[:1])
    plan = pool.plan({"full": 6, "window": 3})
    pool.commit(plan, {"window": plan.ids["tokens"][:3]})  # type: ignore[union-attr]
    free = pool.usage().gap // 16
    plan = pool.plan({"full": free})
    assert plan, "the free bytes lie on both sides of the float and serve once it slides"
    pool.commit(plan)
    pool.check()
    assert pool.moved_pages["state"] == 0
    assert 0 < pool.moved_pages["window"] <= 3


def test_release_credit_answers_what_eviction_would_give() -> None:
    pool = Pool(20 * 16, groups_of({"full": 2, "window": 1}))
    traffic = Traffic(pool, 0)
    while traffic.grant({"full": 1, "window": 1}):
        pass
    want = {"full": 2, "window": 1}
    assert not pool.plan(want)
    assert not pool.plan(want, release={"full": 1})
    answer = pool.plan(want, release={"full": 2, "window": 1})
    assert answer
    with pytest.raises(RuntimeError, match="what-if"):
        pool.commit(answer, {"window": answer.ids.get("tokens", [])[:1]})  # type: ignore[union-attr]
    pool.check()


def test_fits_asks_an_empty_pool() -> None:
    pool = Pool(20 * 16, groups_of({"full": 2, "window": 1}))
    traffic = Traffic(pool, 0)
    while traffic.grant({"full": 1, "window": 1}):
        pass
    assert pool.fits({"full": 6, "window": 6})
    assert not pool.fits({"full": 7, "window": 6})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_fits_at_all_does_not_depend_on_what_is_there(shape: str) -> None:
    sizes, walls = SHAPES[shape]
    groups, walls = groups_of(sizes), walls and {n: u * 16 for n, u in walls.items()}
    cells = 26
    for seed in range(20):
        pool, empty = (Pool(cells * 16, groups, walls=walls) for _ in range(2))
        traffic = Traffic(pool, seed, pins=True)
        for _ in range(6):
            traffic.grant(traffic.demand(4))
            traffic.pin()
            want = traffic.demand(5)
            assert pool.fits(want) == empty.could(want)


def test_a_refusal_says_how_much_is_missing() -> None:
    """Of the bytes that stay live and are asked for, what is more than the arena has beside its null page."""
    pool = Pool(10 * 16, groups_of({"full": 3}))
    assert Traffic(pool, 0).grant({"full": 1})
    refusal = pool.plan({"full": 4})
    assert isinstance(refusal, Refusal)
    assert refusal.short_bytes == (1 + 4) * 48 - (10 * 16 - 48)
    assert f"{refusal.short_bytes:,} bytes are missing" in refusal.message
