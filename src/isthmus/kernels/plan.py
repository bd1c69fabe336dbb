"""Which program reads what: rows of integers that the attention kernels take their work from. NumPy, no device."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Integers = NDArray[np.integer]

FIELDS = 8
"""Of an item or a tile."""

ALIGN = 64
"""Tokens. A sequence is cut at multiples of it, so that no block of keys is read by two items."""

ITEM_TOKENS = 32
"""What taking up an item costs, in tokens read."""

PART_TOKENS = 32
"""What leaving a part for the merge and merging it costs, in tokens read."""

_Shared: TypeAlias = tuple[Integers, Integers, Int32]
"""Items: the decode of each, how far into its tokens it begins, and the programs' bounds."""


class DecodeWork(NamedTuple):
    """Of one decode launch."""

    items: Int32  # [n, 8] = (token, sequence, first, end, base, index, parts, last)
    bounds: Int32  # [programs + 1]: program p takes items bounds[p] up to bounds[p + 1]
    slots: int  # of the workspace


def plan_decode(tokens: Integers, sequences: Integers, first: Integers, end: Integers, *, programs: int) -> DecodeWork:
    """Share the cached tokens of decodes out among programs that run at once.

    Decode d is token `tokens[d]` of the flat batch; its sequence is row `sequences[d]` of the page table, and it reads
    cached tokens [first[d], end[d]), its own row among them. `first[d] == end[d]` gives an item that writes zeros: a
    padding lane. `programs` are those of a KV head. `last` is the position of the decode's own row, `end[d] - 1`.

    The same lengths always give the same work. There are fewer items than decodes + programs, and as many slots of the
    workspace as there are items of decodes that have several.
    """
    if not len(tokens):
        return DecodeWork(np.zeros((0, FIELDS), np.int32), np.zeros(programs + 1, np.int32), 0)
    origin = first & -ALIGN
    span = np.where(end > first, end - origin, 0)
    owner, cut, bounds = _share_out(span, programs)
    items = np.zeros((FIELDS, len(owner)), np.int32)
    items[0], items[1], items[6], items[7] = tokens[owner], sequences[owner], 1, end[owner] - 1
    items[2], items[3] = np.maximum(origin[owner] + cut, first[owner]), end[owner]
    if len(owner) == len(span):
        return DecodeWork(np.ascontiguousarray(items.T), bounds, 0)
    parts = np.bincount(owner)
    before, alone = np.cumsum(parts) - parts, parts == 1
    inner = np.flatnonzero(owner[1:] == owner[:-1])
    items[3, inner] = items[2, inner + 1]
    items[4] = (before - (np.cumsum(alone) - alone))[owner]
    items[5], items[6] = np.arange(len(owner)) - before[owner], parts[owner]
    return DecodeWork(np.ascontiguousarray(items.T), bounds, len(owner) - int(np.count_nonzero(alone)))


def _share_out(span: Integers, programs: int) -> _Shared:
    """So that the last program ends as soon as one can tell; decodes that are cut come in order."""
    cost = span + ITEM_TOKENS
    share = max(float(cost.sum()) / programs, ALIGN)
    most = share + ITEM_TOKENS + 2 * PART_TOKENS  # of `_in_line`, which cuts decodes at both ends of a program's items
    if len(span) > programs:
        whole, longest = _whole(cost, programs)
        return whole if longest <= most else _in_line(span, share, programs)
    even = _even(span, most, programs)
    if even is None and int(cost.max()) <= most:
        return _own(np.arange(len(span)), np.zeros_like(span), programs)
    return even or _in_line(span, share, programs)


def _even(span: Integers, most: float, programs: int) -> _Shared | None:
    """An item for each program, as short as they can all be. None: some would take longer than `most`."""
    fewest = max(1, -(-int(span.sum()) // (programs * ALIGN)))
    for tokens in range(fewest * ALIGN, int(most) - ITEM_TOKENS - PART_TOKENS + 1, ALIGN):
        parts = np.maximum(-(-span // tokens), 1)
        if (items := int(parts.sum())) <= programs:
            owner = np.repeat(np.arange(len(span)), parts)
            index = np.arange(items) - (np.cumsum(parts) - parts)[owner]
            return _own(owner, index * tokens, programs)
    return None


def _own(owner: Integers, cut: Integers, programs: int) -> _Shared:
    """An item for each program, as far as they go."""
    bounds = np.arange(programs + 1, dtype=np.int32)
    bounds[len(owner) :] = len(owner)
    return owner, cut, bounds


def _whole(cost: Integers, programs: int) -> tuple[_Shared, float]:
    """The longest first, and back again from the last program, so that who has a long one gets a short one next; and
    what the program with most has to do."""
    turn, at = np.divmod(np.arange(len(cost)), programs)
    program = np.where(turn % 2, programs - 1 - at, at)
    longest_first = np.argsort(-cost, kind="stable")
    todo = np.bincount(program, cost[longest_first], programs)
    bounds = np.zeros(programs + 1, np.int32)
    np.cumsum(np.bincount(program, minlength=programs), out=bounds[1:])
    owner = longest_first[np.argsort(program, kind="stable")]
    return (owner, np.zeros_like(owner), bounds), float(todo.max())


def _in_line(span: Integers, share: float, programs: int) -> _Shared:
    """One behind the other, cut wherever a program's share is full (Stream-K: Osama, Merrill, Cecka, Garland and Owens,
    2023)."""
    cost = span + ITEM_TOKENS
    behind = np.cumsum(cost)
    full = share * np.arange(1, programs)
    full = full[full < behind[-1]]
    which = np.searchsorted(behind, full, side="right")
    inside = full - (behind - cost)[which] - ITEM_TOKENS
    inside = np.clip(np.rint(inside / ALIGN).astype(np.int64) * ALIGN, 0, span[which])
    place = np.cumsum(span + 1) - (span + 1)  # one place more than tokens, so that padding has one too
    ends = place[which] + inside + (inside == span[which])  # behind all of a decode is where the next begins
    starts = np.concatenate((place, ends))
    starts.sort()
    new = np.empty(len(starts), np.bool_)
    new[0] = True
    np.not_equal(starts[1:], starts[:-1], out=new[1:])
    new &= starts <= place[-1] + span[-1]  # behind the last is no item
    starts = starts[new]
    owner = np.searchsorted(place, starts, side="right") - 1
    bounds = np.full(programs + 1, len(starts), np.int32)
    bounds[0], bounds[1 : len(ends) + 1] = 0, np.searchsorted(starts, ends)
    return owner, starts - place[owner], bounds


def plan_prefill(bounds: Integers, past: Integers, sequences: Integers, block: int, window: int | None = None) -> Int32:
    """Cut chunks into tiles of `block` queries, the most expensive first.

    Chunk c is tokens [bounds[0, c], bounds[1, c]) of the flat batch, with `past[c]` cached tokens before it; its
    sequence is row `sequences[c]` of the page table. The window decides nothing but the order.

    Returns tiles int32 `[n, 8]` = (sequence, chunk_start, chunk_end, tile_start, past, 0, 0, 0).
    """
    return dearest_first(cut_chunks(bounds, past, sequences, block), block, window)


def cut_chunks(bounds: Integers, past: Integers, sequences: Integers, block: int) -> Int32:
    """The tiles of `plan_prefill` as columns int32 `[8, n]`, in the order of the tokens: alike for all windows."""
    start, end = bounds
    tiles_of = -(-(end - start) // block)
    ends = tiles_of.cumsum()
    chunks = np.zeros((FIELDS, len(sequences)), np.int32)
    chunks[0], chunks[1], chunks[2], chunks[3], chunks[4] = sequences, start, end, ends - tiles_of, past
    tiles = chunks.repeat(tiles_of, axis=1)
    tiles[3] = (np.arange(tiles.shape[1], dtype=np.int32) - tiles[3]) * np.int32(block) + tiles[1]
    return tiles


def dearest_first(tiles: Int32, block: int, window: int | None) -> Int32:
    """Columns of `cut_chunks` as rows, by the keys that they read."""
    _, start, end, tile_start, past = tiles[:5]
    cost = past + np.minimum(tile_start + np.int32(block), end) - start
    if window is not None:
        np.minimum(cost, window + block, out=cost)
    rows: Int32 = tiles.T.take((-cost).argsort(kind="stable"), axis=0)
    return rows
