"""Everything of a pool that later outcomes depend on, as arrays, and a pool that goes on from them.

    numbers   [demands refused; pages moved per group; ids minted per space], `wide`
    spaces    free ids in the order they will be handed out
    groups    [lo, hi], bound ids (none written where the group binds every live id: they follow), their pages,
              pinned pages, how many hold each

The rest follows: owners and holes from tables and spans, live ids from free ones. Operations that were planned and
not yet taken (`Pool.take_delta`) are no part of it: they are outcomes, not causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from isthmus.memory.records import Int32, IntLike, narrow, wide

if TYPE_CHECKING:
    from isthmus.memory.pool import Pool


def state_of(pool: Pool) -> list[IntLike]:
    """The arrays above. Cost: the whole bookkeeping, once."""
    minted = [ids.minted for ids in pool.spaces.values()]
    arrays: list[IntLike] = [wide(pool.refusals, *pool.moved_pages.values(), *minted)]
    arrays += [ids.free_ids() for ids in pool.spaces.values()]
    for name, group in pool.groups.items():
        region, entries = pool.regions[name], pool.tables[name].entries
        covers = name in pool.covering[group.space]
        bound = np.flatnonzero(entries)
        pins = sorted(region.pins)
        arrays += [[region.lo, region.hi], () if covers else bound, entries[bound]]
        arrays += [pins, [region.pins[page] for page in pins]]
    return arrays


def restore(pool: Pool, arrays: Sequence[Int32]) -> None:
    """Put a pool that is as it was made into the state that `state_of` told of one made alike.

    ValueError or IndexError for arrays that no such pool gave.
    """
    groups, spaces = len(pool.groups), len(pool.spaces)
    if len(arrays) != 1 + spaces + 5 * groups:
        raise ValueError(f"{len(arrays)} arrays where {1 + spaces + 5 * groups} describe this pool")
    pool.refusals, *counts = narrow(arrays[0])
    pool.moved_pages = dict(zip(pool.groups, counts[:groups], strict=True))
    for ids, minted, free in zip(pool.spaces.values(), counts[groups:], arrays[1 : 1 + spaces], strict=True):
        ids.restore(free.astype(np.int64), minted)
    for i, (name, group) in enumerate(pool.groups.items()):
        span, bound, pages, pinned, holders = arrays[1 + spaces + 5 * i : 6 + spaces + 5 * i]
        ids_of = pool.spaces[group.space].live_ids() if name in pool.covering[group.space] else bound
        if len(ids_of) != len(pages):
            raise ValueError(f"group {name!r}: {len(pages)} pages for {len(ids_of)} ids")
        pins = dict(zip(pinned.tolist(), holders.tolist(), strict=True))
        pool.bindings[name].restore(int(span[0]), int(span[1]), ids_of.astype(np.int64), pages.astype(np.int64), pins)


def most_bytes(pool: Pool) -> int:
    """A snapshot of this pool, written out, never takes more; nor does any single change."""
    ids = sum(space.capacity for space in pool.spaces.values())
    pages = pool.arena_bytes // min(group.spec.page_bytes for group in pool.groups.values())
    return 4 * (4 * ids + 4 * pages + 64 * len(pool.groups))
