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


SHORTEST = 128
"""Tokens of a part of a tile, at least."""

TILE_PART = 64
"""What one part more of a tile costs, in keys read: queries loaded again, rows left in the workspace."""

TILE_MERGE = 128
"""What it costs a step that its tiles' parts are merged, in keys read: a launch that waits for the last of them."""

_PIECES = np.unique(np.rint(1.15 ** np.arange(60)).astype(np.int64))
"""That the longest tile may be cut into: every number up to 8, then steps of about 15 %."""


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
    span = (end - origin) * (end > first)
    shared = _share_out(span, programs)
    if shared is None:
        items = np.zeros((len(tokens), FIELDS), np.int32)
        columns = items.T
        columns[0], columns[1], columns[2], columns[3] = tokens, sequences, first, end
        columns[6], columns[7] = 1, end - 1
        return DecodeWork(items, _own(len(tokens), programs), 0)
    owner, cut, bounds = shared
    items = np.zeros((len(owner), FIELDS), np.int32)
    columns = items.T
    columns[0], columns[1], columns[6], columns[7] = tokens[owner], sequences[owner], 1, end[owner] - 1
    columns[2], columns[3] = np.maximum(origin[owner] + cut, first[owner]), end[owner]
    if len(owner) == len(span):
        return DecodeWork(items, bounds, 0)
    parts = np.bincount(owner)
    before, alone = parts.cumsum() - parts, parts == 1
    inner = (owner[1:] == owner[:-1]).nonzero()[0]
    columns[3, inner] = columns[2, inner + 1]
    columns[4] = (before - (alone.cumsum() - alone))[owner]
    columns[5], columns[6] = np.arange(len(owner)) - before[owner], parts[owner]
    return DecodeWork(items, bounds, len(owner) - int(np.count_nonzero(alone)))


def _share_out(span: Integers, programs: int) -> _Shared | None:
    """So that the last program ends as soon as one can tell; decodes that are cut come in order. None: each is an item,
    for a program of its own."""
    total, longest = int(np.add.reduce(span)), int(np.maximum.reduce(span))
    share = max((total + ITEM_TOKENS * len(span)) / programs, ALIGN)
    most = share + ITEM_TOKENS + 2 * PART_TOKENS  # of `_in_line`, which cuts decodes at both ends of a program's items
    if len(span) > programs:
        whole, todo = _whole(span + ITEM_TOKENS, programs)
        return whole if todo <= most else _in_line(span, share, programs)
    # An item for each program, as short as they can all be.
    fewest = max(1, -(-total // (programs * ALIGN)))
    for tokens in range(fewest * ALIGN, min(longest, int(most) - ITEM_TOKENS - PART_TOKENS + 1), ALIGN):
        parts = np.maximum(-(-span // tokens), 1)
        if (items := int(np.add.reduce(parts))) <= programs:
            owner = np.repeat(np.arange(len(span)), parts)
            index = np.arange(items) - (np.cumsum(parts) - parts)[owner]
            return owner, index * tokens, _own(items, programs)
    return None if longest + ITEM_TOKENS <= most else _in_line(span, share, programs)


def _own(items: int, programs: int) -> Int32:
    """Bounds of an item for each program, as far as they go."""
    bounds = np.arange(programs + 1, dtype=np.int32)
    bounds[items:] = items
    return bounds


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
    behind = cost.cumsum()
    full = share * np.arange(1, programs)
    full = full[full < behind[-1]]
    which = behind.searchsorted(full, side="right")
    inside = full - (behind - cost)[which] - ITEM_TOKENS
    inside = np.minimum(np.maximum(np.rint(inside / ALIGN).astype(np.int64) * ALIGN, 0), span[which])
    place = (span + 1).cumsum() - (span + 1)  # one place more than tokens, so that padding has one too
    ends = place[which] + inside + (inside == span[which])  # behind all of a decode is where the next begins
    starts = np.concatenate((place, ends))
    starts.sort()
    new = np.empty(len(starts), np.bool_)
    new[0] = True
    np.not_equal(starts[1:], starts[:-1], out=new[1:])
    new &= starts <= place[-1] + span[-1]  # behind the last is no item
    starts = starts[new]
    owner = place.searchsorted(starts, side="right") - 1
    bounds = np.full(programs + 1, len(starts), np.int32)
    bounds[0], bounds[1 : len(ends) + 1] = 0, starts.searchsorted(ends)
    return owner, starts - place[owner], bounds


class PrefillWork(NamedTuple):
    """Of one prefill launch."""

    tiles: Int32  # [n, 8] = (sequence, chunk_start, chunk_end, tile_start, past, width, index, parts)
    slots: int  # the parts: they come first, those of a tile together and in order


def plan_prefill(
    bounds: Integers,
    past: Integers,
    sequences: Integers,
    block: int,
    window: int | None = None,
    *,
    chunked: bool = False,
    programs: int,
) -> PrefillWork:
    """Cut chunks into tiles of `block` queries, the most expensive first, and tiles with long lines of keys into parts.

    Chunk c is tokens [bounds[0, c], bounds[1, c]) of the flat batch, with `past[c]` cached tokens before it; its
    sequence is row `sequences[c]` of the page table. `programs` are those of a KV head that run at once.

    A tile reads the keys from the first that its first query sees up to its last query's own. Part `index` of `parts`
    reads `width` of them, counted from the last multiple of ALIGN up to the first; the last part reads the rest, and
    begins no later than the tile's first query, so that without a window every query sees some key of every part.
    `parts` is 0 for a whole tile.

    The same lengths always give the same work, with `most_parts(programs)` slots and rows more than tiles, at most.
    """
    tiles = dearest_first(cut_chunks(bounds, past, sequences, block), block, window)
    return split_long(tiles, block, window, chunked=chunked, programs=programs)


def most_parts(programs: int) -> int:
    """Slots that a plan takes, at most: twice as many as run at once, for tiles just too long to halve."""
    return 2 * programs


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


def split_long(tiles: Int32, block: int, window: int | None, *, chunked: bool, programs: int) -> PrefillWork:
    """Rows of `dearest_first`, those cut into parts that would keep a step waiting while other programs have no work.

    All parts are made about as long as the one number allows that lets the step end soonest.
    """
    before = _keys_before(tiles.T, window, chunked)
    longest, every = int(before.max(initial=0)) + block, int(before.sum()) + block * len(tiles)
    if longest <= 2 * SHORTEST or 4 * longest * programs <= 5 * every:  # there is nearly enough work for all
        return PrefillWork(tiles, 0)
    even = programs // len(tiles), 2 * programs // len(tiles)  # what is best where all tiles are alike
    pieces = np.append(_PIECES, np.maximum(even, 1))
    pieces = pieces[pieces <= min(2 * programs, longest // SHORTEST)]
    width = -(-longest // (pieces * ALIGN)) * ALIGN
    parts = before // width[:, None] + 1
    items = parts.sum(1)
    slots = items - np.count_nonzero(parts == 1, axis=1)
    rounds = -(-items // programs)
    time = np.maximum(width, rounds * (every + TILE_PART * slots) / items)
    time[slots > 0] += TILE_PART + TILE_MERGE
    time[slots > most_parts(programs)] = np.inf
    best = int(time.argmin())
    return _cut(tiles, before, parts[best]) if slots[best] else PrefillWork(tiles, 0)


def _keys_before(columns: Int32, window: int | None, chunked: bool) -> Integers:
    """How many keys each tile reads before its first query's own, counted from a multiple of ALIGN."""
    _, start, _, tile_start, past = columns[:5]
    position: Integers = past + tile_start - start  # of the first query
    if window is None:
        return position
    seen: Integers = position % window if chunked else np.minimum(position, window - 1)
    return seen + (position - seen) % ALIGN


def _cut(tiles: Int32, before: Integers, parts: Integers) -> PrefillWork:
    """Each tile in so many parts, as equal as multiples of ALIGN can be."""
    long = parts > 1
    n = parts[long]
    rows = tiles[long].repeat(n, axis=0)
    rows[:, 5] = np.repeat(before[long] // (n * ALIGN) * ALIGN + ALIGN, n)
    rows[:, 6] = np.arange(len(rows)) - np.repeat(n.cumsum() - n, n)
    rows[:, 7] = np.repeat(n, n)
    return PrefillWork(np.concatenate((rows, tiles[~long])), len(rows))
