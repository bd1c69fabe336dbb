"""Every token is read once, by an item that the kernel can take; lengths alone decide how."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.tile_parts import keys_of

from isthmus.kernels.plan import (
    ALIGN,
    ITEM_TOKENS,
    PART_TOKENS,
    SHORTEST,
    DecodeWork,
    PrefillWork,
    most_parts,
    plan_decode,
    plan_prefill,
)

CHUNKS = st.lists(st.tuples(st.integers(2, 700), st.integers(0, 70_000)), min_size=1, max_size=12)
WINDOWS = st.none() | st.tuples(st.integers(1, 5000), st.booleans())
RANGES = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)).map(sorted), min_size=1, max_size=40)


def decode(ranges: list[list[int]], programs: int) -> DecodeWork:
    first, end = np.array(ranges, np.int32).T
    tokens = np.arange(len(ranges), dtype=np.int32) * 3 + 1
    rows = np.arange(len(ranges), dtype=np.int32)[::-1]
    return plan_decode(tokens, rows, first, end, programs=programs)


def todo(work: DecodeWork) -> np.ndarray:
    """Of each program, in tokens: those it reads, and what taking up items and leaving parts costs."""
    items = work.items
    cost = items[:, 3] - items[:, 2] + ITEM_TOKENS + PART_TOKENS * (items[:, 6] > 1)
    return np.diff(np.concatenate(([0], np.cumsum(cost)))[work.bounds])


@given(RANGES, st.integers(1, 600))
def test_items_of_a_sequence_tile_its_range(ranges: list[list[int]], programs: int) -> None:
    items, _, slots = decode(ranges, programs)
    assert items.dtype == np.int32
    assert items.shape[1] == 8
    used: list[int] = []
    for d, (first, end) in enumerate(ranges):
        own = items[items[:, 0] == d * 3 + 1]
        own = own[np.argsort(own[:, 5])]
        assert (own[:, 1] == len(ranges) - 1 - d).all()
        assert own[:, 5].tolist() == list(range(len(own)))
        assert (own[:, 6] == len(own)).all()
        assert (own[:, 7] == end - 1).all()
        assert own[0, 2] == first
        assert own[-1, 3] == end
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert (own[1:, 2] % ALIGN == 0).all()
        assert first == end or (own[:, 2] < own[:, 3]).all()
        if len(own) > 1:
            assert len(set(own[:, 4])) == 1
            used += range(own[0, 4], own[0, 4] + len(own))
    assert sorted(used) == list(range(slots)), "parts share a slot, or slots are left out"


@given(RANGES, st.integers(1, 600))
def test_every_item_is_one_programs(ranges: list[list[int]], programs: int) -> None:
    items, bounds, _ = decode(ranges, programs)
    assert bounds.dtype == np.int32
    assert len(bounds) == programs + 1
    assert (bounds[0], bounds[-1]) == (0, len(items))
    assert (np.diff(bounds) >= 0).all()


@given(RANGES, st.integers(1, 600))
def test_no_more_items_than_promised(ranges: list[list[int]], programs: int) -> None:
    """The workspace and the buffers of captured graphs are sized by the promise."""
    assert len(decode(ranges, programs).items) < len(ranges) + programs


@given(RANGES, st.integers(1, 600))
def test_no_program_has_much_more_to_do_than_its_share(ranges: list[list[int]], programs: int) -> None:
    """A step takes as long as the program with most: an equal share of all, what two cuts cost, and that cuts are
    rounded."""
    first, end = np.array(ranges).T
    cost = np.where(end > first, end - first // ALIGN * ALIGN, 0) + ITEM_TOKENS
    share = max(cost.sum() / programs, ALIGN)
    assert todo(decode(ranges, programs)).max() <= share + ITEM_TOKENS + 2 * PART_TOKENS + ALIGN


def test_an_empty_range_is_one_padding_item() -> None:
    items, _, slots = decode([[0, 0], [7, 7]], 16)
    assert items[:, [2, 3, 6]].tolist() == [[0, 0, 1], [7, 7, 1]]
    assert slots == 0


def test_no_decodes_make_no_items() -> None:
    none = np.zeros(0, np.int32)
    items, bounds, slots = plan_decode(none, none, none, none, programs=264)
    assert items.shape == (0, 8)
    assert bounds.tolist() == [0] * 265
    assert slots == 0


@pytest.mark.parametrize(("length", "sequences"), [(131072, 1), (131072, 4), (8192, 64), (512, 8)])
def test_few_long_sequences_are_spread_over_the_programs(length: int, sequences: int) -> None:
    work = decode([[0, length]] * sequences, 264)
    fewest = min(264, sequences * length // ALIGN)
    assert np.count_nonzero(np.diff(work.bounds)) >= fewest / 2


def test_a_full_batch_of_windows_is_not_cut() -> None:
    """Parts cost a merge, which a batch that fills the programs anyway should not pay."""
    items, _, slots = decode([[1000 + i, 1512 + i] for i in range(256)], 264)
    assert len(items) == 256
    assert slots == 0


def test_one_sequence_too_many_does_not_double_the_time() -> None:
    """300 sequences for 264 programs: whole, 36 programs would do twice the work of the others."""
    assert todo(decode([[0, 4096]] * 300, 264)).max() < 1.1 * 300 / 264 * 4096


def test_who_has_the_longest_gets_the_shortest_next() -> None:
    """Windows of the same length would be no test: sequences of all lengths, twice as many as programs."""
    work = decode([[0, 64 * i] for i in range(1, 33)], 16)
    assert work.slots == 0
    assert set(todo(work)) == {33 * 64 + 2 * ITEM_TOKENS}


def test_tiles_cover_every_chunk_once() -> None:
    bounds = np.array([[1, 41], [40, 57]])
    tiles, slots = plan_prefill(bounds, np.array([0, 500]), np.array([1, 3]), 16, programs=1)
    assert slots == 0
    assert tiles.dtype == np.int32
    # The second chunk has few queries but hundreds of cached tokens; within the first, later queries see more.
    assert tiles.tolist() == [
        [3, 41, 57, 41, 500, 0, 0, 0],
        [1, 1, 40, 33, 0, 0, 0, 0],
        [1, 1, 40, 17, 0, 0, 0, 0],
        [1, 1, 40, 1, 0, 0, 0, 0],
    ]


def test_a_window_makes_late_tiles_alike() -> None:
    """Without it a chunk's last tile would come first, though it reads no more than the others."""
    tiles, _ = plan_prefill(np.array([[0], [64]]), np.array([500]), np.array([0]), 16, 128, programs=1)
    assert tiles[:, 3].tolist() == [0, 16, 32, 48]


def prefill(
    chunks: list[tuple[int, int]], block: int, programs: int, window: int | None = None, *, chunked: bool = False
) -> PrefillWork:
    counts, past = np.array(chunks, np.int32).T
    ends = np.cumsum(counts, dtype=np.int32) + 5
    which = np.arange(len(chunks), dtype=np.int32)[::-1]
    return plan_prefill(np.stack((ends - counts, ends)), past, which, block, window, chunked=chunked, programs=programs)


@given(CHUNKS, st.sampled_from([1, 16, 64]), st.integers(1, 264), WINDOWS)
def test_parts_of_a_tile_read_every_key_once(
    chunks: list[tuple[int, int]], block: int, programs: int, sight: tuple[int, bool] | None
) -> None:
    window, chunked = sight or (None, False)
    tiles, slots = prefill(chunks, block, programs, window, chunked=chunked)
    again = prefill(chunks, block, programs, window, chunked=chunked)
    assert np.array_equal(tiles, again.tiles)
    assert tiles.dtype == np.int32
    count = sum(-(-n // block) for n, _ in chunks)
    assert slots <= most_parts(programs)
    assert len(tiles) - count <= slots
    rows = iter(tiles)
    seen = set()
    for row in rows:
        n = max(1, int(row[7]))
        own = [row, *(next(rows) for _ in range(n - 1))]
        assert (row[7] > 0) == (n > 1)
        assert all((part[:6] == row[:6]).all() for part in own)
        assert [int(part[6]) for part in own] == list(range(n))
        seen.add((int(row[0]), int(row[3])))
        keys = [keys_of(part, block, window, chunked=chunked) for part in own]
        whole = keys_of(np.array([*row[:5], 0, 0, 0]), block, window, chunked=chunked)
        assert (keys[0].first, keys[-1].end) == whole
        assert [k.end for k in keys[:-1]] == [k.first for k in keys[1:]]
        assert all(k.first < k.end for k in keys), "a part that has nothing to read"
        assert all(k.first % ALIGN == 0 for k in keys[1:])
        assert keys[-1].first <= row[4] + row[3] - row[1], "the tile's first query sees nothing of the last part"
    assert len(seen) == count, "a tile is missing, or its parts do not lie together"
    assert (tiles[:slots, 7] > 1).all()
    assert not tiles[slots:, 5:].any()


@pytest.mark.parametrize(
    ("chunk", "past", "block", "programs", "window"),
    [
        (256, 8192, 64, 33, None),
        (256, 65_536, 64, 33, None),
        (512, 65_536, 64, 33, None),
        (100, 100_000, 32, 132, None),
        (505, 4000, 64, 33, 1024),
        (16, 8192, 16, 16, None),
    ],
)
def test_a_short_chunk_behind_many_tokens_is_spread_over_the_programs(
    chunk: int, past: int, block: int, programs: int, window: int | None
) -> None:
    """Whole, each of its few tiles would read all the keys in line."""
    tiles, slots = prefill([(chunk, past)], block, programs, window)
    assert slots == len(tiles), "all are as long"
    keys = [keys_of(row, block, window) for row in tiles]
    read = sum(k.end - k.first for k in keys)
    # In rounds: nobody waits for anybody, so a step takes as long as its longest parts one after the other.
    rounds = -(-len(tiles) // programs)
    assert rounds * max(k.end - k.first for k in keys) < 1.35 * read / programs + ALIGN


@pytest.mark.parametrize("programs", [16, 33, 132])
@pytest.mark.parametrize(
    "chunks", [[(8192, 0)], [(2048, 0)] * 4, [(2048, 6144)] * 4, [(512, 8192)] * 16, [(SHORTEST, SHORTEST)]]
)
def test_a_step_with_work_for_all_is_not_cut(chunks: list[tuple[int, int]], programs: int) -> None:
    assert prefill(chunks, 16, programs).slots == 0


def test_a_long_tile_among_many_short_ones_is_cut() -> None:
    """Whole, it would take four times as long as everything else for everybody."""
    tiles, _ = prefill([(6000, 0), (64, 65_536)], 64, 33)
    read = np.array([k.end - k.first for k in (keys_of(row, 64) for row in tiles)])
    assert read.max() < read.sum() / 33


@pytest.mark.parametrize("past", [900, 8192, 65_536])
def test_parts_of_alike_tiles_are_alike(past: int) -> None:
    """No part is the rest that is left of a long line."""
    tiles, slots = prefill([(256, past)], 64, 33)
    read = [k.end - k.first for k in (keys_of(row, 64) for row in tiles)]
    assert slots == len(tiles)
    assert max(read) - min(read) <= 64 * max(tiles[:, 7]) + 256
