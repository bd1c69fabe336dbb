"""A window that keeps one more boundary can be restored at the last page boundary before its newest token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cache import CacheKind, Window, kind_of
from isthmus.memory import Group, opaque_spec

SIZES = [(page_size, window) for page_size in (1, 4, 16) for window in (1, 2, 3, 5, 16, 17, 33)]


def one(kind: CacheKind, past: int, new: int) -> tuple[int, int, int, int]:
    """`dead(past)`, both ends of `extend` and `held` of one sequence."""
    at, more = np.array([past]), np.array([new])
    low, high = kind.extend(at, more)
    return int(kind.dead(at)[0]), int(low[0]), int(high[0]), int(kind.held(at, more)[0])


@pytest.mark.parametrize(("page_size", "window"), SIZES)
@settings(deadline=None, max_examples=40)
@given(chunks=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_after_every_chunk_the_last_boundary_before_the_newest_token_can_be_restored(
    page_size: int, window: int, chunks: list[int]
) -> None:
    keeps, plain = Window(page_size, window, keep_boundary=True), Window(page_size, window)
    past, bound = 0, set[int]()
    for n in chunks:
        dead, low, high, held = one(keeps, past, n)
        bound = (bound - set(range(dead))) | set(range(low, high))
        assert len(bound) == held
        assert held <= one(plain, past, n)[3] + 2, "one page more on either side of the chunk"
        past += n
        kept = bound - set(range(one(keeps, past, 1)[0]))
        assert len(kept) <= len(range(one(plain, past, 1)[0], -(-past // page_size))) + 1, "one page more at rest"
        for boundary in {(past - 1) // page_size, past // page_size}:
            at = boundary * page_size
            seen = {token // page_size for token in range(max(0, at - window + 1), at)}
            assert seen <= kept, f"boundary {boundary} at {past} tokens"


def test_a_prompt_in_one_chunk_leaves_the_boundary_that_the_same_prompt_starts_from() -> None:
    """8,192 tokens: the same prompt again computes its last page, from boundary 511, which sees column 479."""
    past, new = np.array([0]), np.array([8192])
    assert Window(16, 512).extend(past, new)[0][0] == 480
    assert Window(16, 512, keep_boundary=True).extend(past, new)[0][0] == 479


def test_it_is_off_unless_asked_for() -> None:
    group = Group("window", opaque_spec(32, 16), "window", 512)
    lengths = np.arange(2000)
    for kind in (kind_of(group), Window.of(group), Window(16, 512)):
        assert np.array_equal(kind.dead(lengths), np.maximum(lengths - 511, 0) // 16)
    assert not np.array_equal(Window.of(group, keep_boundary=True).dead(lengths), kind_of(group).dead(lengths))
