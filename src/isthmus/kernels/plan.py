"""Which program reads what: rows of integers that the attention kernels take their work from. NumPy, no device."""

from __future__ import annotations

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

    Returns items int32 `[n, 8]` = (token, sequence, first, end, base, index, parts, 0), longest first, and how many
    slots of the workspace they use. The same lengths always give the same items. There are never more than
    decodes + 2 * target_items, unless even items of MAX_CHUNK tokens are more.
    """
    count = len(tokens)
    if count == 0:
        return np.zeros((0, FIELDS), np.int32), 0
    origin = first // ALIGN * ALIGN
    span = (end - origin) * (end > first)
    chunk = _chunk(span, target_items)
    parts = np.maximum(-(-span // chunk), 1)
    owner = np.repeat(np.arange(count), parts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    slots = np.where(parts > 1, parts, 0)
    items = np.zeros((len(owner), FIELDS), np.int32)
    cut = origin[owner] + index * chunk
    items[:, 0] = tokens[owner]
    items[:, 1] = sequences[owner]
    items[:, 2] = np.maximum(cut, first[owner])
    items[:, 3] = np.minimum(cut + chunk, end[owner])
    items[:, 4] = (np.cumsum(slots) - slots)[owner]
    items[:, 5] = index
    items[:, 6] = parts[owner]
    return items[np.argsort(items[:, 2] - items[:, 3], kind="stable")], int(slots.sum())


def _chunk(span: Integers, target: int) -> int:
    """The tokens per item that end soonest if `target` items run at once."""
    parts = np.maximum(-(-span // CHUNKS[:, None]), 1)
    items = parts.sum(1)
    slots = np.where(parts > 1, parts, 0).sum(1)
    longest = np.minimum(CHUNKS, span.max()) + ITEM_TOKENS + PART_TOKENS * (slots > 0)
    # List scheduling: everything divided by the programs, and half of an item too long at the end.
    spread = (span.sum() + ITEM_TOKENS * items + PART_TOKENS * slots) / target + longest / 2
    cost = np.where(items <= target, longest, np.maximum(longest, spread))
    cost[:-1][items[:-1] > len(span) + 2 * target] = np.inf
    return int(CHUNKS[np.argmin(cost)])


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
