"""Which keys a row of a prefill plan stands for, as the kernel reads it; and tiles cut finer than plans cut them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from isthmus.kernels.plan import ALIGN, Int32, PrefillWork


class Keys(NamedTuple):
    """Of a row: positions [first, end)."""

    first: int
    end: int


def keys_of(row: Int32, block: int, window: int | None = None, *, chunked: bool = False) -> Keys:
    """What a whole tile or a part reads, of the cache and of the step's own rows behind it."""
    _, chunk_start, chunk_end, tile_start, past, width, index, parts = row.tolist()
    position = past + tile_start - chunk_start
    first = 0
    if window is not None:
        first = position // window * window if chunked else max(0, position - window + 1)
    cut = first // ALIGN * ALIGN + index * width
    end = past + min(tile_start + block, chunk_end) - chunk_start
    return Keys(max(first, cut), cut + width if index + 1 < parts else end)


def cut_all(tiles: Int32, width: int, block: int, window: int | None = None, *, chunked: bool = False) -> PrefillWork:
    """Every tile of a plan that has none, in parts of `width` keys."""
    parts, whole = [], []
    for row in tiles:
        first = keys_of(row, block, window, chunked=chunked).first
        n = int(row[4] + row[3] - row[1] - first // ALIGN * ALIGN) // width + 1
        if n > 1:
            parts += [[*row[:5], width, i, n] for i in range(n)]
        else:
            whole.append(row.tolist())
    return PrefillWork(np.array(parts + whole, np.int32), len(parts))
