"""Regions on the byte line: what can be arranged, and which arrangement moves least.

    | null | end(low) >>>      float <> float <>      <<< end(high) | tail |

A `Chain` is an interval of bytes and the regions that share it, low to high. The unified arena is one
chain; `--memory static` is one chain per region (walls), and nothing else differs. Equation, asserted:

    lo <= end(low) <= float ... <= end(high) <= hi        in bytes, no overlap

Every region keeps to its own page grid (page p lies at p * page_bytes), so a border costs up to a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.group import Group, null_bytes
from isthmus.memory.region import Anchor, Region

Span: TypeAlias = tuple[int, int]
Index = NDArray[np.int64]


class Chain:
    """Regions in byte order within [lo, hi). Holds no state of its own besides the borders."""

    def __init__(self, lo: int, hi: int, regions: Sequence[Region]) -> None:
        self.lo = lo
        self.hi = hi
        self.regions = tuple(regions)

    def arrange(self, need: Sequence[int]) -> list[Span] | None:
        """New spans, one per region, that hold `need[i]` pages each; None if and only if no arrangement exists.

        Today's spans stay where they serve. When they cannot all stay, every choice of regions that may
        shrink or slide is priced by the bytes it would move, fewest regions first, and the cheapest wins.
        """
        everyone = (True,) * len(self.regions)
        spans = self.fit(need, everyone)
        if spans is not None or not self.holds(need):
            return spans
        for size in range(1, len(self.regions) + 1):
            options = (self.fit(need, keep) for keep in _all_but(len(self.regions), size))
            priced = [(self.moved_bytes(option), option) for option in options if option is not None]
            if priced:
                return min(priced)[1]
        raise AssertionError("an arrangement with every region loose exists but was not found")

    def holds(self, need: Sequence[int]) -> bool:
        """Is there any arrangement that holds so many pages of each?"""
        return self._packs_low(need, [region.cover(keep=False) for region in self.regions])

    def fit(self, need: Sequence[int], keep: Sequence[bool]) -> list[Span] | None:
        """Spans where region i keeps today's span inside its new one if `keep[i]`, else only its pinned pages.

        Exact by leftmost packing: taking every region from the low side as low as it goes leaves the most
        room to the ones above it, so if that fails nothing fits. The mirror packing gives the highest byte
        each region may reach; between the two limits each region stays as near to today's span as it can.
        """
        covers = [region.cover(keep=k) for region, k in zip(self.regions, keep, strict=True)]
        if not self._packs_low(need, covers):
            return None
        limits = self._limits(need, covers)
        spans: list[Span] = []
        edge = self.lo
        for region, n, cover, limit in zip(self.regions, need, covers, limits, strict=True):
            a = max(region.first, -(-edge // region.page_bytes))
            b = min(region.last, limit // region.page_bytes)
            span = _place(region, n, cover, a, b)
            if span[0] < span[1]:
                edge = span[1] * region.page_bytes
            spans.append(span)
        return spans

    def moved_bytes(self, spans: Sequence[Span]) -> int:
        """Bytes of live pages that these spans leave outside. Cost: the pages of today's spans outside the new."""
        return sum(
            len(region.outside(lo, hi)) * region.page_bytes
            for region, (lo, hi) in zip(self.regions, spans, strict=True)
        )

    def move_order(self, spans: Sequence[Span]) -> list[int]:
        """Indices of the regions in an order in which no move lands on a live page or an uncopied source.

        A region only ever enters bytes a neighbour leaves. Ends and shrinking floats enter none: they go
        first, together with floats going down, from below; then floats going up, from above.
        """
        rising = [i for i, (r, (_, hi)) in enumerate(zip(self.regions, spans, strict=True)) if _rises(r, hi)]
        return [i for i in range(len(spans)) if i not in rising] + rising[::-1]

    def gaps(self) -> Iterator[int]:
        """Free bytes below each region and, last, above the highest."""
        edge = self.lo
        for region in self.regions:
            if region.span:
                yield region.lo * region.page_bytes - edge
                edge = region.hi * region.page_bytes
            else:
                yield 0
        yield self.hi - edge

    def emptied(self) -> Chain:
        """The same borders and grids with nothing live. For questions alone: its regions have room for no owner."""
        return Chain(
            self.lo,
            self.hi,
            [Region(r.name, r.page_bytes, 0, r.first, r.last, r.anchor) for r in self.regions],
        )

    def check(self) -> None:
        """Assert the equation at the top of this file and every region's own."""
        assert all(gap >= 0 for gap in self.gaps()), f"regions overlap: {[(r.name, r.lo, r.hi) for r in self.regions]}"
        for region in self.regions:
            region.check()

    def _packs_low(self, need: Sequence[int], covers: Sequence[Span]) -> bool:
        edge = self.lo
        for region, n, (cover_lo, cover_hi) in zip(self.regions, need, covers, strict=True):
            covered = cover_lo < cover_hi
            if n == 0 and not covered:
                continue
            lo = max(region.first, -(-edge // region.page_bytes))
            if region.anchor is Anchor.HIGH:
                return lo <= (min(region.last - n, cover_lo) if covered else region.last - n)
            if covered and cover_lo < lo:
                return False
            hi = max(lo + n, cover_hi) if covered else lo + n
            if hi > region.last:
                return False
            edge = hi * region.page_bytes
        return edge <= self.hi

    def _limits(self, need: Sequence[int], covers: Sequence[Span]) -> list[int]:
        """The highest byte at which each region may end when all above it are packed high."""
        limits: list[int] = []
        edge = self.hi
        for region, n, (cover_lo, cover_hi) in zip(
            reversed(self.regions), reversed(need), reversed(covers), strict=True
        ):
            limits.append(edge)
            covered = cover_lo < cover_hi
            if n == 0 and not covered:
                continue
            hi = min(region.last, edge // region.page_bytes)
            lo = min(hi - n, cover_lo) if covered else hi - n
            edge = lo * region.page_bytes
        return limits[::-1]


def build_chains(groups: Sequence[Group], arena_bytes: int, walls: Mapping[str, int] | None) -> list[Chain]:
    """One chain of all groups, given low to high, above their null pages; with walls, bytes per group, one for each.

    ValueError if the walls name other groups, or more bytes than there are.
    """
    lo = null_bytes(groups)
    if walls is None:
        return [_chain(lo, arena_bytes, groups, arena_bytes)]
    if set(walls) != {g.name for g in groups} or min(walls.values()) < 0:
        raise ValueError(f"walls must name a size for each of {', '.join(g.name for g in groups)}")
    if lo + sum(walls.values()) > arena_bytes:
        raise ValueError(
            f"walls of {sum(walls.values())} bytes and {lo} for the null pages do not fit an arena of {arena_bytes}"
        )
    chains = []
    for group in groups:
        hi = lo + walls[group.name]
        chains.append(_chain(lo, hi, [group], arena_bytes))
        lo = hi
    return chains


def _chain(lo: int, hi: int, groups: Sequence[Group], arena_bytes: int) -> Chain:
    anchors = [Anchor.LOW, *[Anchor.FLOAT] * (len(groups) - 2), Anchor.HIGH][: len(groups)]
    regions = []
    for group, anchor in zip(groups, anchors, strict=True):
        size = group.spec.page_bytes
        regions.append(Region(group.name, size, arena_bytes // size, -(-lo // size), hi // size, anchor))
    return Chain(lo, hi, regions)


def _place(region: Region, n: int, cover: Span, a: int, b: int) -> Span:
    """The span inside [a, b) nearest to today's that holds n pages and the cover; the caller proved one exists."""
    lo, hi = region.lo, region.hi
    covered = cover[0] < cover[1]
    if n == 0 and not covered:
        edge = {Anchor.LOW: region.first, Anchor.HIGH: region.last, Anchor.FLOAT: min(max(lo, a), max(a, b))}[
            region.anchor
        ]
        return edge, edge
    if region.anchor is Anchor.LOW:
        return region.first, max(region.first + n, min(hi, b))
    if region.anchor is Anchor.HIGH:
        return min(region.last - n, max(lo, a)), region.last
    if not region.span:
        middle = a + (b - a - n) // 2
        return middle, middle + n
    lo, hi = (a, a) if hi <= a else (b, b) if lo >= b else (max(lo, a), min(hi, b))
    short = n - (hi - lo)
    if short > 0:
        below, above = lo - a, b - hi
        first, second = (below, above) if below > above else (above, below)
        big = min(short, first)
        small = min(short - big, second)
        down, up = (big, small) if below > above else (small, big)
        lo, hi = lo - down, hi + up
    return lo, hi


def _rises(region: Region, hi: int) -> bool:
    return region.anchor is Anchor.FLOAT and hi > region.hi


def _all_but(n: int, size: int) -> Iterator[tuple[bool, ...]]:
    for loose in combinations(range(n), size):
        yield tuple(i not in loose for i in range(n))
