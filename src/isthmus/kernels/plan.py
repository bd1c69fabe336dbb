"""Which program reads what: rows of integers that the attention kernels take their work from. NumPy, no device."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Integers = NDArray[np.integer]

FIELDS = 8
"""Of an item or a tile."""

ALIGN = 64
"""Tokens. A sequence is cut at multiples of it, so that no block of keys is read by two items."""

MAX_CHUNK = 8192
"""Tokens of the longest item."""

CHUNKS = ALIGN << np.arange((MAX_CHUNK // ALIGN).bit_length())
"""Tokens of an item: what `plan_decode` chooses from."""

_ROUND = (CHUNKS - 1).astype(np.int32)[:, None]
_SHIFTS = np.log2(CHUNKS).astype(np.int32)[:, None]

ITEM_TOKENS = 32
"""What taking up an item costs, in tokens read."""

PART_TOKENS = 32
"""What leaving a part for the merge and merging it costs, in tokens read."""


def plan_decode(
    tokens: Integers, sequences: Integers, first: Integers, end: Integers, *, target_items: int
) -> tuple[Int32, int]:
    """Cut the cached tokens of decodes into items of like cost.

    Decode d is token `tokens[d]` of the flat batch; its sequence is row `sequences[d]` of the page table, and it reads
    cached tokens [first[d], end[d]), its own row among them. `first[d] == end[d]` gives an item that writes zeros: a
    padding lane. `target_items` is how many items run at once: the programs of a KV head.

    Returns items int32 `[n, 8]` = (token, sequence, first, end, base, index, parts, last), longest first, where `last`
    is the position of the decode's own row, `end[d] - 1`; and how many slots of the workspace they use. The same
    lengths always give the same items. There are never more than decodes + 2 * target_items, unless even items of
    MAX_CHUNK tokens are more.
    """
    count = len(tokens)
    if count == 0:
        return np.zeros((0, FIELDS), np.int32), 0
    origin = first & -ALIGN
    span = np.where(end > first, end - origin, 0)
    chunk, parts = _cut(span, target_items)
    items = np.zeros((FIELDS, count if parts is None else int(parts.sum())), np.int32)
    used = 0
    if parts is None:
        items[0], items[1], items[2], items[3], items[6], items[7] = tokens, sequences, first, end, 1, end - 1
    else:
        owner = np.repeat(np.arange(count), parts)
        before = np.cumsum(parts) - parts
        alone = parts == 1
        whole = np.cumsum(alone) - alone
        index = np.arange(len(owner)) - before[owner]
        cut = origin[owner] + index * chunk
        items[0], items[1] = tokens[owner], sequences[owner]
        np.maximum(cut, first[owner], out=items[2], casting="same_kind")
        np.minimum(cut + chunk, end[owner], out=items[3], casting="same_kind")
        items[4], items[5], items[6], items[7] = (before - whole)[owner], index, parts[owner], end[owner] - 1
        used = items.shape[1] - int(np.count_nonzero(alone))
    length = (items[3] - items[2]).astype(np.int16)  # of MAX_CHUNK at most; a stable sort of these takes no comparisons
    return items.T[np.argsort(-length, kind="stable")], used


def _cut(span: Integers, target: int) -> tuple[int, Integers | None]:
    """The tokens per item that end soonest if `target` items run at once, and the items of each decode; None: one."""
    parts = np.maximum((span + _ROUND) >> _SHIFTS, 1)
    items = parts.sum(1).tolist()
    whole = (parts == 1).sum(1).tolist()
    count, total, longest_span = len(span), int(span.sum()), int(span.max())
    best, at = math.inf, -1
    for i, chunk in enumerate(CHUNKS.tolist()):
        if items[i] > count + 2 * target and i < len(CHUNKS) - 1:
            continue
        slots = items[i] - whole[i]
        longest = min(chunk, longest_span) + ITEM_TOKENS + PART_TOKENS * (slots > 0)
        cost = float(longest)
        if items[i] > target:
            # List scheduling: everything divided by the programs, and half of an item too long at the end.
            spread = (total + ITEM_TOKENS * items[i] + PART_TOKENS * slots) / target + longest / 2
            cost = max(cost, spread)
        if cost < best:
            best, at = cost, i
    return int(CHUNKS[at]), None if whole[at] == count else parts[at]


def plan_prefill(bounds: Integers, past: Integers, sequences: Integers, block: int, window: int | None = None) -> Int32:
    """Cut chunks into tiles of `block` queries, the most expensive first.

    Chunk c is tokens [bounds[0, c], bounds[1, c]) of the flat batch, with `past[c]` cached tokens before it; its
    sequence is row `sequences[c]` of the page table. The window decides nothing but the order.

    Returns tiles int32 `[n, 8]` = (sequence, chunk_start, chunk_end, tile_start, past, 0, 0, 0).
    """
    start, end = bounds
    tiles_of = -(-(end - start) // block)
    owner = np.repeat(np.arange(len(sequences)), tiles_of)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    tiles = np.zeros((len(owner), FIELDS), np.int32)
    tiles[:, 0] = sequences[owner]
    tiles[:, 1] = start[owner]
    tiles[:, 2] = end[owner]
    tiles[:, 3] = start[owner] + index * block
    tiles[:, 4] = past[owner]
    cost = past[owner] + np.minimum((index + 1) * block, (end - start)[owner])
    if window is not None:
        cost = np.minimum(cost, window + block)
    return tiles[np.argsort(-cost, kind="stable")]
