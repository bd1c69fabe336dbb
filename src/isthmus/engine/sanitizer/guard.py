"""The pool with doors that serve on: what cannot be given back is refused alone, and fenced ids are never given back.

A fenced id stays live, and a page that something may still point at stays where it is, pinned; so that harms nobody:

    live ids = ids of sequences + ids of the prefix cache + fenced ids
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.memory import Group, Journal, Plan, Pool, VirtualLike
from isthmus.memory.ids import as_virtual
from isthmus.memory.region import Anchor, Region

Ids = NDArray[np.int64]

Complaint = Callable[[str, int, str], None]
"""`(id space, id, why)` of an id that somebody wanted to give back."""


class GuardedPool(Pool):
    """A pool for `Sanitizer`. See `Pool`; `complain` is set by whoever wants to hear of refused ids."""

    def __init__(
        self,
        arena_bytes: int,
        groups: Sequence[Group],
        *,
        walls: Mapping[str, int] | None = None,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(arena_bytes, groups, walls=walls, journal=journal)
        self.complain: Complaint | None = None
        self.fenced = {name: np.zeros(ids.capacity + 1, np.bool_) for name, ids in self.spaces.items()}
        self.shielded = {name: np.zeros(ids.capacity + 1, np.bool_) for name, ids in self.spaces.items()}
        """Ids that must not be given back now, whoever asks."""
        self._fences: dict[str, list[int]] = {name: [] for name in self.spaces}

    @property
    def fenced_pages(self) -> dict[str, int]:
        """Pages per group that nobody will get any more."""
        return {name: int(self.is_bound(name, self._fences[group.space]).sum()) for name, group in self.groups.items()}

    def release(self, space: str, ids: VirtualLike) -> None:
        """As always, but for ids that are not the caller's to give back: those are complained of, or fenced."""
        index = self._theirs(space, ids)
        if len(index):
            super().release(space, index)

    def unbind(self, group: str, ids: VirtualLike) -> None:
        """As `release`."""
        index = self._theirs(self.groups[group].space, ids)
        index = index[self.is_bound(group, index)]
        if len(index):
            super().unbind(group, index)

    def copy(self, group: str, source: VirtualLike, destination: VirtualLike) -> None:
        """As always, but for copies from or to what has no page: those are complained of."""
        space = self.groups[group].space
        origin, to = as_virtual(source), as_virtual(destination)
        there = self.is_bound(group, origin) & self.is_bound(group, to)
        for virtual in origin[~there].tolist():
            self._complain(space, virtual, "it was to be copied, and it or its copy has no page")
        if there.any():
            super().copy(group, origin[there], to[there])

    def rebind(self, group: str, source: VirtualLike, target: VirtualLike) -> None:
        """As always, but for ids that are not live: those are complained of, and keep or lack what they have."""
        space = self.groups[group].space
        origin, to = as_virtual(source), as_virtual(target)
        live = self.spaces[space].is_live(origin) & self.spaces[space].is_live(to)
        for virtual in to[~live].tolist():
            self._complain(space, virtual, "it was to get a page, and it or the page's id is not live")
        if live.any():
            super().rebind(group, origin[live], to[live])

    def fence(self, space: str, ids: Iterable[int]) -> None:
        """These live ids and their pages are nobody's from now on, until the pool ends. Their pages may be moved."""
        index = np.unique(np.fromiter(ids, np.int64))
        index = index[~self.fenced[space][index]]
        self.fenced[space][index] = True
        self._fences[space] += index.tolist()

    def hold(self, group: str, page: int) -> None:
        """This page of a fenced id is not moved either: something may still point at the place."""
        owner = int(self.regions[group].owner[page])
        assert self.fenced[self.groups[group].space][owner], "only what is fenced is held for good"
        if page not in self.regions[group].pins:
            self.pin(group, [owner])

    def seize(self, group: str, page: int) -> bool:
        """Fence a physical page that nobody has: ask for pages until it is among them. False if it cannot be had now,
        because its bytes are another group's."""
        region, space = self.regions[group], self.groups[group].space
        if not region.first <= page < region.last or region.owner[page]:
            return False
        wanted = dict.fromkeys((*self.covering[space], group), _before(region, page) + 1)
        plan = self.plan(wanted)
        if not isinstance(plan, Plan):
            return False
        ids = np.asarray(plan.ids[space]).astype(np.int64)
        self.commit(plan, {group: ids})
        holder = int(region.owner[page])
        if holder:
            self.fence(space, [holder])
            self.hold(group, page)
        super().release(space, ids[ids != holder])
        return holder > 0

    def _theirs(self, space: str, ids: VirtualLike) -> Ids:
        """Those of the ids that can be given back. Whoever names places instead of ids gives back nothing."""
        try:
            index = as_virtual(ids)
        except TypeError as error:
            self._complain(space, 0, str(error))
            return np.zeros(0, np.int64)
        known = self.spaces[space]
        inside = (index > 0) & (index <= known.capacity)
        live = inside.copy()
        live[inside] = known.is_live(index[inside])
        first = np.zeros(len(index), np.bool_)
        first[np.unique(index, return_index=True)[1]] = True
        for i in np.flatnonzero(~(live & first)).tolist():
            why = "there is no such id" if not inside[i] else "it is given twice" if live[i] else "it is not live"
            self._complain(space, int(index[i]), why)
        index = index[live & first]
        index = index[~(self.fenced[space][index] | self.shielded[space][index])]
        pinned = self._pinned(space, index)
        for virtual in index[pinned].tolist():
            self._complain(space, virtual, "a transfer holds one of its pages")
        return index[~pinned]

    def _pinned(self, space: str, index: Ids) -> NDArray[np.bool_]:
        """Which of these ids have a page that must stay where it is?"""
        pinned = np.zeros(len(index), np.bool_)
        for name, group in self.groups.items():
            pins = self.regions[name].pins
            if pins and group.space == space:
                pinned |= np.isin(self.tables[name].entries[index], list(pins))
        return pinned

    def _complain(self, space: str, virtual: int, why: str) -> None:
        assert self.complain is not None, f"an id of {space!r} cannot be given back: {virtual}: {why}"
        self.complain(space, virtual, why)


def _before(region: Region, page: int) -> int:
    """How many free pages a region hands out before this one (`Region.take`)."""
    high = region.anchor is Anchor.HIGH
    if region.lo <= page < region.hi:
        return len(region.holes.within(page + 1, region.hi) if high else region.holes.within(region.lo, page))
    return len(region.holes) + (region.lo - 1 - page if page < region.lo else page - region.hi)
