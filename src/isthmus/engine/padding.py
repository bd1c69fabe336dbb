"""Work for the tokens that fill a step up to the size of its graph: it reads no page and writes no page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.kernels.plan import FIELDS

ALIGN = 8
"""Tokens: matrix products like their number to be a multiple."""

Int32 = NDArray[np.int32]


def padding_items(start: int, end: int) -> Int32:
    """Items for a step of decodes: zeros for tokens [start, end)."""
    items = np.zeros((end - start, FIELDS), np.int32)
    items[:, 0] = np.arange(start, end)
    items[:, 6] = 1
    return items


def padding_tiles(start: int, end: int, block: int) -> Int32:
    """Tiles for any other step: tokens [start, end) as a chunk of their own, with nothing before it."""
    tile = np.arange(start, end, block)
    tiles = np.zeros((len(tile), FIELDS), np.int32)
    tiles[:, 1], tiles[:, 2], tiles[:, 3] = start, end, tile
    return tiles
