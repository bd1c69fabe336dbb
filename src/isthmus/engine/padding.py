"""Work for the tokens that fill a step up to the size of its graph: it reads no page and writes no page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.kernels.plan import FIELDS, DecodeWork

ALIGN = 8
"""Tokens: matrix products like their number to be a multiple."""

Int32 = NDArray[np.int32]


def padded_items(work: DecodeWork, start: int, end: int) -> DecodeWork:
    """Of a step of decodes, with zeros for tokens [start, end): those go round, beginning with the last program."""
    items = np.zeros((end - start, FIELDS), np.int32)
    items[:, 0] = np.arange(start, end)
    items[:, 6] = 1
    programs = len(work.bounds) - 1
    each = np.full(programs, len(items) // programs)
    each[programs - len(items) % programs :] += 1
    bounds = work.bounds.copy()
    bounds[1:] += np.cumsum(each, dtype=np.int32)
    at = np.repeat(work.bounds[1:], each) + np.arange(len(items))
    live = np.ones(len(work.items) + len(items), np.bool_)
    live[at] = False
    padded = np.empty((len(live), FIELDS), np.int32)
    padded[at], padded[live] = items, work.items
    return DecodeWork(padded, bounds, work.slots)


def padding_tiles(start: int, end: int, block: int) -> Int32:
    """Tiles for any other step: tokens [start, end) as a chunk of their own, with nothing before it."""
    tile = np.arange(start, end, block)
    tiles = np.zeros((len(tile), FIELDS), np.int32)
    tiles[:, 1], tiles[:, 2], tiles[:, 3] = start, end, tile
    return tiles
