"""The arena in bytes, at one moment: every byte is live, a hole, a gap, null or tail, and the parts sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.memory.arena import Chain
from isthmus.memory.region import Anchor

_NULL, _HOLE, _FREE = "0", ".", " "


@dataclass(frozen=True)
class GroupUsage:
    """One region. `span_pages = live_pages + cached_pages + hole_pages`."""

    name: str
    page_bytes: int
    live_pages: int
    hole_pages: int
    lo_byte: int  # where its span starts in the arena
    hi_byte: int
    cached_pages: int = 0  # owned by a prefix cache and not used: given back when somebody needs the bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of pages somebody owns."""
        return self.live_pages * self.page_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of pages that only a prefix cache holds."""
        return self.cached_pages * self.page_bytes

    @property
    def hole_bytes(self) -> int:
        """Bytes of free pages between the frontiers."""
        return self.hole_pages * self.page_bytes


@dataclass(frozen=True)
class ArenaUsage:
    """`total = null + gap + tail + Σ (live + cached + hole)`; `groups` in byte order."""

    total: int
    null: int
    gap: int  # free bytes between frontiers, the slack of page grids included
    tail: int  # bytes above the last whole page of the high end while it has pages, or beyond the walls
    groups: dict[str, GroupUsage]

    @classmethod
    def of(cls, chains: Sequence[Chain], total: int, cached: Mapping[str, int]) -> ArenaUsage:
        """An arena of `total` bytes, chains low to high; `cached[group]` of its owned pages are unused."""
        groups = {
            r.name: GroupUsage(
                r.name,
                r.page_bytes,
                r.live - cached.get(r.name, 0),
                len(r.holes),
                r.lo * r.page_bytes,
                r.hi * r.page_bytes,
                cached.get(r.name, 0),
            )
            for chain in chains
            for r in chain.regions
        }
        gap = sum(gap for chain in chains for gap in chain.gaps())
        high = chains[-1].regions[-1]
        top = chains[-1].hi
        if high.anchor is Anchor.HIGH and high.span:  # above its last whole page nobody can be
            gap, top = gap - (top - high.hi * high.page_bytes), high.hi * high.page_bytes
        return cls(total, chains[0].lo, gap, total - top, groups)

    @property
    def live(self) -> int:
        """Bytes of pages somebody owns, all groups together."""
        return sum(group.live_bytes for group in self.groups.values())

    def check(self) -> None:
        """Assert that the parts sum to the arena."""
        groups = sum(g.live_bytes + g.cached_bytes + g.hole_bytes for g in self.groups.values())
        parts = self.null + self.gap + self.tail + groups
        assert parts == self.total, f"arena of {self.total} bytes, but its parts sum to {parts}"

    def draw(self, width: int = 72) -> str:
        """One line, low to high: a group's initial where it is, `.` when it is mostly holes, blank for the gap."""
        cells = [_FREE] * width
        for mark, lo, hi in self._intervals():
            for cell in range(
                lo * width // self.total, max(lo * width // self.total + 1, -(-hi * width // self.total))
            ):
                if cell < width and cells[cell] == _FREE:
                    cells[cell] = mark
        return "[" + "".join(cells) + "]"

    def table(self) -> str:
        """Rows of bytes per group and state, and the sum."""
        rows = [f"{'group':<10}{'live':>16}{'cached':>16}{'holes':>16}{'pages':>10}"]
        for g in self.groups.values():
            rows.append(f"{g.name:<10}{g.live_bytes:>16,}{g.cached_bytes:>16,}{g.hole_bytes:>16,}{g.live_pages:>10,}")
        rows += [
            f"{name:<10}{value:>16,}" for name, value in (("gap", self.gap), ("null", self.null), ("tail", self.tail))
        ]
        rows.append(f"{'arena':<10}{self.total:>16,}")
        return "\n".join(rows)

    def _intervals(self) -> list[tuple[str, int, int]]:
        found = [(_NULL, 0, self.null)] if self.null else []
        for g in self.groups.values():
            if g.hi_byte > g.lo_byte:
                mark = g.name[0].upper() if g.live_pages + g.cached_pages >= g.hole_pages else _HOLE
                found.append((mark, g.lo_byte, g.hi_byte))
        return found
