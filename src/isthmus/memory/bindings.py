"""One group's bindings: which virtual id has which physical page, in the page table and in the region at once.

Equations, asserted by `check`:

    table[v] = p > 0  <=>  owner[p] = v
    a covering group binds every live id of its space; any other group's ids are a subset (ids.py)

Only the doors of `Pool` call what changes something here, after `require_...`, and `snapshot.restore` at the start of a
life; nobody else changes a table, or who owns or pins a page of a region. A change returns the operations that repeat
it on a device, in order, for the pool to collect.
"""

from __future__ import annotations

import numpy as np

from isthmus.memory.delta import Frees, Moves, Op, Writes
from isthmus.memory.group import Group
from isthmus.memory.ids import IdSpace, PhysicalPages, VirtualPages, as_physical
from isthmus.memory.region import Index, Region


class Bindings:
    """The pages of one group, by id and by place. Pages and ids are index arrays `[n]`, one page per id."""

    def __init__(self, group: Group, region: Region, space: IdSpace, covers: bool) -> None:
        self.name = group.name
        self.region = region  # physical -> virtual, holes and pins; its frontiers move with the pages
        self.space = space  # whose ids these are; its states are the pool's to change
        self.table = space.table(group.name)  # virtual -> physical
        self.covers = covers  # binds every live id of its space

    # -- asking ---------------------------------------------------------------------------------------------

    def pages(self, ids: Index) -> Index:
        """The page of each id, 0 where it has none."""
        return self.table.pages(ids).astype(np.int64)

    def owners(self, pages: PhysicalPages) -> VirtualPages:
        """The id of each page, 0 for nobody. TypeError for untranslated ids, IndexError outside the arena."""
        index, owner = as_physical(pages), self.region.owner
        if index.size and (index.min() < 0 or index.max() >= len(owner)):
            raise IndexError(f"group {self.name!r}: a physical page outside 0..{len(owner) - 1}")
        return owner[index].view(VirtualPages)

    def require_bound(self, ids: Index) -> Index:
        """The page of each id. ValueError if one has none."""
        pages = self.table.pages(ids).astype(np.int64)
        if (pages == 0).any():
            raise ValueError(f"group {self.name!r}: virtual page id {int(ids[pages == 0][0])} is not bound")
        return pages

    def require_bindable(self, ids: Index, fresh: Index) -> None:
        """ValueError unless each id is live or one of the fresh ones, has no page, and is given once."""
        alive = self.space.is_live(ids)
        if np.count_nonzero(alive) < len(ids):
            unknown = ids[~alive]
            strange = unknown[~np.isin(unknown, fresh)]
            if len(strange):
                raise ValueError(
                    f"group {self.name!r}: virtual page id {int(strange[0])} is neither live nor one of the plan's"
                )
        bound = self.table.pages(ids) != 0
        if np.count_nonzero(bound):
            raise ValueError(f"group {self.name!r}: virtual page id {int(ids[bound][0])} has a page already")
        self.space.require_distinct(ids)

    def require_movable(self, pages: Index) -> None:
        """ValueError if one of them is pinned."""
        pins = self.region.pins
        if pins:
            held = [page for page in pages.tolist() if page in pins]
            if held:
                raise ValueError(
                    f"group {self.name!r}: physical page {held[0]} is pinned by a transfer: unpin it first"
                )

    # -- changing -------------------------------------------------------------------------------------------

    def bind(self, ids: Index, lo: int, hi: int) -> Writes:
        """Ids without a page get free ones of the span-to-be [lo, hi)."""
        pages = self.region.take(len(ids), lo, hi)
        self.region.occupy(pages, ids)
        return self._write(ids, pages)

    def free(self, ids: Index, pages: Index) -> tuple[Op, ...]:
        """These ids lose these pages, which are theirs; the frontiers retreat."""
        if not len(ids):
            return ()
        self.region.vacate(pages)
        self.region.trim()
        return self._write(ids, np.zeros(len(ids), np.int64)), Frees(self.name, pages.astype(np.int32))

    def move(self, lo: int, hi: int) -> tuple[Moves, Writes] | None:
        """What lies outside of the span-to-be [lo, hi) moves to free pages inside; None if nothing does."""
        region = self.region
        source = region.outside(lo, hi)
        if not len(source):
            return None
        ids = region.owner[source].astype(np.int64)
        destination = region.take(len(source), lo, hi)
        region.occupy(destination, ids)
        region.vacate(source)
        moves = Moves(self.name, source.astype(np.int32), destination.astype(np.int32))
        return moves, self._write(ids, destination)

    def rebind(self, source: Index, target: Index, pages: Index) -> tuple[Writes, Writes]:
        """The pages of the source ids are from now on those of the target ids, which have none."""
        self.region.owner[pages] = target
        return self._write(source, np.zeros(len(source), np.int64)), self._write(target, pages)

    def pin(self, pages: Index) -> None:
        """One more holds each of these live pages."""
        pins = self.region.pins
        for page in pages.tolist():
            pins[page] = pins.get(page, 0) + 1

    def unpin(self, pages: Index) -> None:
        """One less holds each of them. ValueError, and nothing is changed, for a page that so many do not hold."""
        pins = self.region.pins
        counts: dict[int, int] = {}
        for page in pages.tolist():
            counts[page] = counts.get(page, 0) + 1
            if counts[page] > pins.get(page, 0):
                raise ValueError(f"group {self.name!r}: physical page {page} is not pinned")
        for page, n in counts.items():
            pins[page] -= n
            if not pins[page]:
                del pins[page]

    def restore(self, lo: int, hi: int, ids: Index, pages: Index, pins: dict[int, int]) -> None:
        """Bindings that were never used take over others: the region's span, ids with their pages, and pins."""
        self.table.bind(ids, pages)
        self.region.restore(lo, hi, pages, ids, pins)

    def check(self) -> None:
        """Assert the equations at the top of this file."""
        region, entries = self.region, self.table.entries
        bound = np.flatnonzero(entries)
        assert len(bound) == region.live, f"group {self.name!r}: {len(bound)} ids bound, {region.live} pages live"
        assert np.array_equal(region.owner[entries[bound]], bound), f"group {self.name!r}: table and owners disagree"
        if self.covers:
            every = f"every live id of {self.space.name!r}"
            assert region.live == self.space.live, f"group {self.name!r} does not bind {every}"

    def _write(self, ids: Index, pages: Index) -> Writes:
        self.table.bind(ids, pages)
        return Writes(self.name, ids.astype(np.int32), pages.astype(np.int32))
