"""One group's run of pages in the arena.

    end, low     [first ........ hi)            grows up from `first`
    end, high          [lo ........ last)       grows down from `last`
    float           [lo ........ hi)            between its neighbours, both sides move

Equations, asserted by `check`:

    span = hi - lo = live + holes
    owner[p] > 0  <=>  page p is live  <=>  lo <= p < hi and p is not a hole
    an end or float is trimmed: its outermost page on every movable side is live
    pinned pages are live
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.pageset import PageSet

Index = NDArray[np.int64]
_NONE = np.zeros(0, np.int64)
_SCAN = 64  # pages looked at first when a frontier retreats; doubles, so the cost follows the pages given back


class Anchor(enum.Enum):
    """Which side of a region stays where it is."""

    LOW = "low"
    HIGH = "high"
    FLOAT = "float"


class Region:
    """State of one region; pages here are physical, on this group's own grid.

    Only the group's `Bindings` change it, and `Pool` trims it when a plan is carried out.
    """

    def __init__(self, name: str, page_bytes: int, pages: int, first: int, last: int, anchor: Anchor) -> None:
        self.name = name
        self.page_bytes = page_bytes
        self.first = first  # lowest page this region may ever use (null pages and walls below it)
        self.last = max(first, last)  # one past the highest
        self.anchor = anchor
        self.lo = self.hi = self.last if anchor is Anchor.HIGH else first
        self.live = 0
        self.owner: NDArray[np.int32] = np.zeros(pages, np.int32)  # physical -> virtual, 0 = nobody
        self.holes = PageSet(pages)
        self.pins: dict[int, int] = {}  # page -> how many hold its address; from pin to unpin

    @property
    def span(self) -> int:
        """Pages between the frontiers."""
        return self.hi - self.lo

    def cover(self, *, keep: bool) -> tuple[int, int]:
        """The hull a new span must contain: today's span, or only the pinned pages. Empty when lo >= hi."""
        if keep:
            return self.lo, self.hi
        if not self.pins:
            return self.last, self.first
        return min(self.pins), max(self.pins) + 1

    def packed(self) -> tuple[int, int]:
        """The smallest span at the anchor (a float's: where it starts today) that holds what is live and pinned."""
        pinned = self.cover(keep=False)
        if self.anchor is Anchor.HIGH:
            return min(self.last - self.live, pinned[0]), self.last
        return self.lo, max(self.lo + self.live, pinned[1])

    def take(self, n: int, lo: int, hi: int) -> Index:
        """Choose n free pages in the span-to-be [lo, hi): holes nearest the anchor, then past the frontiers.

        Changes nothing. Pages past the frontiers adjoin them, unless the span-to-be lies clear of today's.
        """
        high = self.anchor is Anchor.HIGH
        holes = _NONE if not len(self.holes) else self.holes.highest(n) if high else self.holes.lowest(n)
        if len(holes) and not (lo <= min(holes[0], holes[-1]) and max(holes[0], holes[-1]) < hi):
            holes = self.holes.within(lo, hi)
            holes = (holes[::-1] if high else holes)[:n]
        short = n - len(holes)
        if not short:
            return holes
        above = lo if self.span == 0 and self.anchor is Anchor.FLOAT else max(self.hi, lo)
        up = np.arange(above, min(hi, above + short))
        if len(up) == n:
            return up
        below = min(self.lo, hi)
        down = np.arange(below - 1, max(lo, below - short + len(up)) - 1, -1)
        parts = [part for part in (holes, up, down) if len(part)]
        pages = parts[0] if len(parts) == 1 else np.concatenate(parts)
        assert len(pages) == n, f"region {self.name!r}: {len(pages)} free pages where the plan counted {n}"
        return pages

    def occupy(self, pages: Index, ids: Index) -> None:
        """Free pages become live pages of these ids; the frontiers move out to include them."""
        if not len(pages):
            return
        lo, hi = int(np.minimum.reduce(pages)), int(np.maximum.reduce(pages)) + 1
        if self.span == 0:
            self.lo = self.hi = self.lo if self.anchor is not Anchor.FLOAT else lo
        lo, hi = min(lo, self.lo), max(hi, self.hi)
        if (lo, hi) == (self.lo, self.hi):
            self.holes.remove(pages)
        else:
            entering = len(pages)
            if len(self.holes):
                old = (pages >= self.lo) & (pages < self.hi)
                self.holes.remove(pages[old])
                entering -= int(np.count_nonzero(old))
            if hi - lo - self.span != entering:  # the new span lies clear of the old one
                entered = np.concatenate((np.arange(lo, self.lo), np.arange(self.hi, hi)))
                self.holes.add(np.setdiff1d(entered, pages, assume_unique=True))
            self.lo, self.hi = lo, hi
        self.owner[pages] = ids
        self.live += len(pages)

    def vacate(self, pages: Index) -> None:
        """Live pages become holes. `trim` afterwards."""
        self.owner[pages] = 0
        self.live -= len(pages)
        self.holes.add(pages)

    def trim(self) -> None:
        """Retreat the movable frontiers past the holes that touch them; an empty region parks at its anchor."""
        if self.live and self._is_trim():
            return
        if self.live == 0:
            lo = hi = (
                self.last if self.anchor is Anchor.HIGH else (self.first if self.anchor is Anchor.LOW else self.lo)
            )
            self.holes.remove(self.holes.within(self.lo, self.hi))
            self.lo, self.hi = lo, hi
            return
        hi = self.hi if self.anchor is Anchor.HIGH else self._last_live() + 1
        lo = self.lo if self.anchor is Anchor.LOW else self._first_live()
        if (lo, hi) != (self.lo, self.hi):
            self.holes.remove(np.concatenate((self.holes.within(self.lo, lo), self.holes.within(hi, self.hi))))
            self.lo, self.hi = lo, hi

    def restore(self, lo: int, hi: int, pages: Index, ids: Index, pins: dict[int, int]) -> None:
        """A region that was never used takes over another's span, live pages with their ids, and pins."""
        self.lo, self.hi, self.live, self.pins = lo, hi, len(pages), pins
        self.owner[pages] = ids
        self.holes.add(np.flatnonzero(self.owner[lo:hi] == 0) + lo)

    def live_within(self, lo: int, hi: int) -> Index:
        """Live pages in [lo, hi), ascending."""
        if hi <= lo:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.owner[lo:hi]) + lo

    def outside(self, lo: int, hi: int) -> Index:
        """Live pages that a span [lo, hi) would leave out, ascending."""
        return np.concatenate(
            (self.live_within(self.lo, min(lo, self.hi)), self.live_within(max(hi, self.lo), self.hi))
        )

    def check(self) -> None:
        """Assert the equations at the top of this file."""
        name = f"region {self.name!r}"
        assert self.first <= self.lo <= self.hi <= self.last, f"{name}: span [{self.lo}, {self.hi}) leaves its bounds"
        assert self.span == self.live + len(self.holes), f"{name}: span != live + holes"
        pages = np.flatnonzero(self.owner)
        assert len(pages) == self.live, f"{name}: live pages differ from their owners"
        assert not self.live or (self.lo <= pages[0] and pages[-1] < self.hi), f"{name}: a live page outside the span"
        assert not self.holes.contains(pages).any(), f"{name}: a live page is also a hole"
        assert len(self.holes.within(self.lo, self.hi)) == len(self.holes), f"{name}: a hole outside the span"
        assert self.anchor is not Anchor.LOW or self.lo == self.first, f"{name}: the low end left its anchor"
        assert self.anchor is not Anchor.HIGH or self.hi == self.last, f"{name}: the high end left its anchor"
        if self.live:
            assert self.anchor is Anchor.HIGH or self.owner[self.hi - 1], f"{name}: a hole touches the upper frontier"
            assert self.anchor is Anchor.LOW or self.owner[self.lo], f"{name}: a hole touches the lower frontier"
        assert all(self.owner[page] for page in self.pins), f"{name}: a pinned page is not live"
        self.holes.check()

    def _is_trim(self) -> bool:
        """Is the outermost page on every movable side live?"""
        high, low = self.anchor is Anchor.HIGH, self.anchor is Anchor.LOW
        return bool((high or self.owner[self.hi - 1]) and (low or self.owner[self.lo]))

    def _last_live(self) -> int:
        top, scan = self.hi, _SCAN
        while True:
            found = self.live_within(max(self.lo, top - scan), top)
            if len(found):
                return int(found[-1])
            top, scan = max(self.lo, top - scan), scan * 2

    def _first_live(self) -> int:
        base, scan = self.lo, _SCAN
        while True:
            found = self.live_within(base, min(self.hi, base + scan))
            if len(found):
                return int(found[0])
            base, scan = min(self.hi, base + scan), scan * 2
