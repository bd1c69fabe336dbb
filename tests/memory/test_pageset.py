"""The hierarchical bitmap against a Python set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.memory.pageset import PageSet


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 4096, 4097, 300_000])
def test_random_life_equals_a_set(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    pages, twin = PageSet(capacity), set[int]()
    for _ in range(60):
        absent = np.setdiff1d(rng.integers(0, capacity, 200), np.fromiter(twin, np.int64, len(twin)))
        chosen = rng.permutation(absent)[: int(rng.integers(0, 120))]
        pages.add(chosen)
        twin |= set(chosen.tolist())
        leave = rng.permutation(np.fromiter(twin, np.int64, len(twin)))[: int(rng.integers(0, 120))]
        pages.remove(leave)
        twin -= set(leave.tolist())
        pages.check()
        ordered, k = sorted(twin), int(rng.integers(0, 90))
        assert pages.lowest(k).tolist() == ordered[:k]
        assert pages.highest(k).tolist() == ordered[::-1][:k]
        lo, hi = sorted(rng.integers(0, capacity + 1, 2).tolist())
        assert pages.within(lo, hi).tolist() == [p for p in ordered if lo <= p < hi]


@given(st.sets(st.integers(0, 999)), st.integers(0, 1000))
def test_contains(members: set[int], k: int) -> None:
    pages = PageSet(1000)
    pages.add(np.array(sorted(members), np.int64))
    assert pages.contains(np.arange(1000)).tolist() == [p in members for p in range(1000)]
    assert len(pages.lowest(k)) == min(k, len(members))
