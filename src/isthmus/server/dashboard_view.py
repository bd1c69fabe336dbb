"""What the engine process tells of its arena and its sequences when somebody watches: counts, never text.

A region is told in cells of 2^k pages on its own grid, as few pages a cell as keep it below `MOST_CELLS`, and equal
neighbours are told once:

    Σ cells · live = live pages      Σ cells · cached = cached pages      of the group, as `Stats` counts them
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isthmus.server import wire

if TYPE_CHECKING:
    from isthmus.cache.prefix import PrefixCache
    from isthmus.engine.core import Engine
    from isthmus.engine.sequence import Sequence
    from isthmus.memory.region import Region

MOST_CELLS = 1024  # of a region; about as many as a screen has columns
MOST_SEQUENCES = 64


def view(engine: Engine) -> wire.View:
    """The engine now. Cost: one pass over the pages of every span."""
    scheduler = engine.scheduler
    regions = [cells(region, scheduler.cache) for region in engine.pool.regions.values()]
    everyone = chain(scheduler.running, scheduler.waiting)
    now = scheduler.clock()
    served = [_served(sequence, now) for sequence in islice(everyone, MOST_SEQUENCES)]
    left_out = len(scheduler.running) + len(scheduler.waiting) - len(served)
    return wire.View(regions, served, left_out)


def cells(region: Region, cache: PrefixCache | None) -> wire.Cells:
    """A region's span, low to high. A cell at either frontier may have fewer pages than the others."""
    pages = 1
    while region.span > pages * (MOST_CELLS - 1):  # on the region's grid, so that it may begin and end inside a cell
        pages *= 2
    owner = region.owner[region.lo : region.hi].astype(np.int64)
    cached = np.zeros(len(owner), np.bool_) if cache is None else cache.is_idle(region.name, owner)
    starts = np.arange(region.lo // pages * pages, region.hi, pages) - region.lo
    counts = np.stack([_sums(there, starts) for there in ((owner > 0) & ~cached, cached)], axis=1)
    return wire.Cells(region.name, region.lo, region.hi, pages, _runs(counts).tolist())


def _sums(there: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of each cell's pages are so."""
    if not len(starts):
        return np.zeros(0, np.int64)
    return np.add.reduceat(there.astype(np.int64), np.maximum(starts, 0))


def _runs(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[cells, live, cached]` of each run of equal rows, flat."""
    if not len(counts):
        return np.zeros(0, np.int64)
    first = np.flatnonzero(np.concatenate(([True], (counts[1:] != counts[:-1]).any(axis=1))))
    lengths = np.diff(np.append(first, len(counts)))
    return np.concatenate((lengths[:, None], counts[first]), axis=1).ravel()


def _served(sequence: Sequence, now: float) -> wire.Served:
    receipt = sequence.request.receipt
    waits = 0.0 if sequence.queued is None else now - sequence.queued
    waited = dict(receipt.waited_for)
    if sequence.queued is not None:
        reason = sequence.waited_for or "queue"
        waited[reason] = waited.get(reason, 0.0) + waits
    return wire.Served(
        request_id=sequence.request.request_id,
        index=sequence.index,
        state=sequence.status.value,
        prompt_tokens=len(sequence.prompt),
        cached_tokens=receipt.cached_tokens,
        done_tokens=sequence.past,
        output_tokens=len(sequence.output),
        limit=sequence.limit,
        waited_seconds=receipt.waited_seconds + waits,
        waited_for=waited,
        restorable=dict(receipt.restorable),
        known_tokens=receipt.known_tokens,
        cut_by=receipt.cut_by,
        preemptions=receipt.preemptions,
    )
