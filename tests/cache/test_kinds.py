"""The contract of every cache kind, checked against a brute-force set of what queries can see."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from isthmus.cache import KINDS, CacheKind, kind_of
from isthmus.memory import Group, opaque_spec
from isthmus.memory.group import Kind

WINDOWS = [1, 2, 3, 5, 16, 17, 33]
GROUPS = [
    Group(f"{name}-{window}-{page_size}", opaque_spec(32, page_size), name, window)  # type: ignore[arg-type]
    for name in KINDS
    for page_size in ([1] if name == "state" else [1, 4, 16])
    for window in (WINDOWS if name == "window" else [None])
]


def one(values: NDArray[np.int64]) -> int:
    assert values.shape == (1,)
    return int(values[0])


def visible(group: Group, query: int) -> set[int]:
    """Columns that a query at this position reads from pages when it is decoded alone."""
    if group.kind == "state":
        return {0}
    first = 0 if group.window is None else max(0, query - group.window + 1)
    return {token // group.spec.page_size for token in range(first, query + 1)}


def replay(group: Group, chunks: list[int]) -> tuple[CacheKind, int]:
    """Feed a sequence in chunks, doing what the kind says; assert the contract at each step."""
    kind, past, most = kind_of(group), 0, 0
    bound: set[int] = set()
    for n in chunks:
        at, new = np.array([past]), np.array([n])
        bound -= set(range(one(kind.dead(at))))
        if past:
            before_chunk = visible(group, past) & set(range(one(kind.columns(at))))
            assert before_chunk <= bound, "a page that the chunk's first query reads was given up"
        low, high = map(one, kind.extend(at, new))
        assert one(kind.columns(at)) <= low <= high == one(kind.columns(at + new))
        gained = set(range(low, high))
        assert not gained & bound
        bound |= gained
        assert one(kind.held(at, new)) == len(bound)
        most, past = max(most, len(bound)), past + n
        later = {column for q in range(past, past + 70) for column in visible(group, q)}
        cached = set(range(one(kind.columns(np.array([past])))))
        assert later & cached <= bound, "a page that a later query reads was never bound"
        assert (past - 1) // group.spec.page_size in bound or group.kind == "state"
    return kind, most


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
@settings(deadline=None, max_examples=30)
@given(chunks=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_what_later_queries_see_is_bound_and_no_page_is_bound_twice(group: Group, chunks: list[int]) -> None:
    replay(group, chunks)


@pytest.mark.parametrize("group", [g for g in GROUPS if g.kind == "window"], ids=lambda g: g.name)
@settings(deadline=None, max_examples=30)
@given(chunks=st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_a_window_holds_the_window_twice_in_a_chunk_and_once_in_a_decode(group: Group, chunks: list[int]) -> None:
    assert group.window is not None
    page_size, span = group.spec.page_size, group.window - 1
    pages = (max(span, 1) + page_size - 2) // page_size + 1  # that so many consecutive tokens can touch
    assert replay(group, chunks)[1] <= 2 * pages
    assert replay(group, [1] * sum(chunks))[1] <= (group.window + page_size - 2) // page_size + 1


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_arrays_give_each_sequence_what_it_gets_alone(group: Group) -> None:
    kind = kind_of(group)
    past, new = np.array([0, 3, 16, 100, 31]), np.array([7, 1, 1, 200, 1])
    low, high = kind.extend(past, new)
    for i in range(len(past)):
        alone = kind.extend(past[i : i + 1], new[i : i + 1])
        assert (low[i], high[i]) == (one(alone[0]), one(alone[1]))
        assert kind.held(past, new)[i] == one(kind.held(past[i : i + 1], new[i : i + 1]))


def test_a_long_chunk_binds_only_the_tail_of_a_window() -> None:
    kind = kind_of(Group("window", opaque_spec(32, 16), "window", 512))
    low, high = kind.extend(np.array([0]), np.array([4096]))
    assert (one(low), one(high)) == ((4096 - 511) // 16, 256)


def test_every_kind_a_group_may_bear_is_registered() -> None:
    assert set(KINDS) == set(get_args(Kind))
