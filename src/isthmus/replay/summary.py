"""What happened in a journal, in numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isthmus.memory import ArenaUsage, Pool, Replay
from isthmus.memory.records import Code
from isthmus.memory.replay import Event

WIDTH = 96  # columns of the arena's map


@dataclass
class Peak:
    """The most bytes of one group that were live at once."""

    bytes: int = 0
    step: int = 0


@dataclass
class Summary:
    """Counted while a replay runs: `note` after every event."""

    life: Replay
    demands: int = 0  # granted
    pages: int = 0  # of them
    compactions: int = 0
    refusals: int = 0
    records: int = 0
    first_step: int | None = None
    first_seconds: float = 0.0
    peaks: dict[str, Peak] = field(default_factory=dict)
    fullest: ArenaUsage | None = None
    fullest_step: int = 0
    _moved: dict[str, int] = field(default_factory=dict)  # before the first event

    def note(self, event: Event) -> None:
        """An event was executed."""
        pool = self.life.pool
        self.records += 1
        if event.code is Code.STATE and self.first_step is None:
            self.first_step, self.first_seconds, self._moved = event.step + 1, event.seconds, dict(pool.moved_pages)
            self.peaks = {name: Peak() for name in pool.groups}
            self._measure(pool, event.step)
        elif event.code is Code.COMMIT:
            self.demands += 1
            self.pages += int(event.record.arrays[0].sum())
            self._measure(pool, event.step)
        elif event.code is Code.REFUSAL:
            self.refusals += 1
        elif event.code is Code.COMPACT:
            self.compactions += 1

    def moved_bytes(self) -> dict[str, int]:
        """Per group, since the journal starts."""
        pool = self.life.pool
        return {
            name: (pool.moved_pages[name] - self._moved.get(name, 0)) * group.spec.page_bytes
            for name, group in pool.groups.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        life = self.life
        return {
            "journal": str(life.path),
            "about": life.header.get("about", {}),
            "started": life.header.get("started"),
            "arena_bytes": life.pool.arena_bytes,
            "records": self.records,
            "first_record": life.first,
            "segments": life.segments,
            "steps": [self.first_step or 0, life.step],
            "seconds": round(life.seconds - self.first_seconds, 6),
            "demands": self.demands,
            "demanded_pages": self.pages,
            "refusals": self.refusals,
            "compactions": self.compactions,
            "moved_bytes": self.moved_bytes(),
            "peak_bytes": {name: {"bytes": peak.bytes, "step": peak.step} for name, peak in self.peaks.items()},
            "fullest": {"step": self.fullest_step, "live_bytes": 0 if self.fullest is None else self.fullest.live},
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        life = self.life
        about = ", ".join(f"{key} {value}" for key, value in life.header.get("about", {}).items())
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(life.header.get("started", 0)))
        yield f"{life.path}: {about or 'a pool'}, started {started}"
        lost = f"; {life.first:,} before them were dropped by the ring" if life.first else ", from the start"
        segments = f"{life.segments} segment" + ("s" if life.segments > 1 else "")
        yield f"{self.records:,} records in {segments}{lost}"
        seconds = life.seconds - self.first_seconds
        yield f"steps {self.first_step or 0:,} to {life.step:,}, {seconds:,.1f} s"
        yield f"{self.demands:,} demands granted, {self.pages:,} pages; {self.refusals:,} refused"
        moved = ", ".join(f"{name} {size:,}" for name, size in self.moved_bytes().items())
        yield f"bytes moved: {moved}" + (f"; {self.compactions:,} compactions" if self.compactions else "")
        yield "most live bytes: " + ", ".join(
            f"{name} {peak.bytes:,} (step {peak.step:,})" for name, peak in self.peaks.items()
        )
        if self.fullest is not None:
            legend = ", ".join(f"{name[0].upper()} {name}" for name in self.fullest.groups)
            yield f"the arena at its fullest, step {self.fullest_step:,} ({legend}, . holes, blank free)"
            yield self.fullest.draw(WIDTH)
            yield self.fullest.table()

    def _measure(self, pool: Pool, step: int) -> None:
        total = 0
        for name, region in pool.regions.items():
            size = region.live * region.page_bytes
            total += size
            if size > self.peaks[name].bytes:
                self.peaks[name] = Peak(size, step)
        if self.fullest is None or total > self.fullest.live:
            self.fullest, self.fullest_step = pool.usage(), step
