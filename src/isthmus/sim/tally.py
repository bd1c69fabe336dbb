"""What a simulation writes down while it runs: when tokens came, how the arena stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.usage import ArenaUsage
from isthmus.sim.arrivals import Arrival

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Number = TypeVar("Number", int, float)


@dataclass
class Tally:
    """Times in seconds by request, in the order of the arrivals; nan: it never came."""

    arrivals: Sequence[Arrival]
    first: Float64 = field(init=False)  # when the first token was there
    last: Float64 = field(init=False)  # and the newest
    end: Float64 = field(init=False)
    preemptions: Int64 = field(init=False)
    refused: dict[int, str] = field(default_factory=dict)  # request -> why it can never be served
    cached_tokens: int = 0  # of prompts, not computed again
    known_tokens: int = 0  # of prompts, known to the prefix cache, whether restorable or not
    restorable: dict[str, int] = field(default_factory=dict)  # per group: tokens of prompts
    cut_by: dict[str, int] = field(default_factory=dict)  # per group: how many hits it cut
    waited_for: dict[str, float] = field(default_factory=dict)  # seconds of all requests
    moved_bytes: int = 0
    copied_bytes: int = 0  # states that were saved or restored
    samples: list[dict[str, float]] = field(default_factory=list)  # of the arena, with "at"
    _gaps: list[Float64] = field(default_factory=list)
    _counts: list[Int64] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.arrivals)
        self.first, self.last, self.end = (np.full(n, np.nan) for _ in range(3))
        self.preemptions = np.zeros(n, np.int64)

    def tokens(self, requests: Int64, now: float) -> None:
        """Each of these has one more token."""
        last = self.last[requests]
        later = ~np.isnan(last)
        if later.all():
            gaps = now - last
        else:
            self.first[requests[~later]] = now
            gaps = now - last[later]
        self.last[requests] = now
        if len(gaps) and (gaps == gaps[0]).all():
            self._note(gaps[:1], np.array([len(gaps)]))
        else:
            self._note(gaps, np.ones(len(gaps), np.int64))

    def coasted(self, requests: Int64, times: Float64) -> None:
        """Each of these got one token at each of these moments, and nothing else happened."""
        first = times[0] - self.last[requests]
        self._note(first, np.ones(len(first), np.int64))
        self._note(np.diff(times), np.full(len(times) - 1, len(requests)))
        self.last[requests] = times[-1]

    def sample(self, now: float, running: int, waiting: int, usage: ArenaUsage) -> None:
        """How the arena stands."""
        entry: dict[str, float] = {"at": now, "running": running, "waiting": waiting}
        for name, group in usage.groups.items():
            entry[f"{name} live"] = group.live_bytes
            entry[f"{name} cached"] = group.cached_bytes
            entry[f"{name} holes"] = group.hole_bytes
        self.samples.append(entry | {"gap": usage.gap + usage.null + usage.tail})

    def gaps(self) -> tuple[Float64, Int64]:
        """Seconds between tokens of a request (inter-token latency), ascending, and how many of each."""
        if not self._gaps:
            return np.zeros(0), np.zeros(0, np.int64)
        gaps, where = np.unique(np.concatenate(self._gaps), return_inverse=True)
        counts = np.bincount(where, weights=np.concatenate(self._counts), minlength=len(gaps))
        return gaps, counts.astype(np.int64)

    def series(self, name: str) -> Float64:
        """One column of the samples."""
        return np.array([sample[name] for sample in self.samples])

    def mean(self, name: str) -> float:
        """Of a column, over the time from the first sample to the last."""
        at = self.series("at")
        if len(at) < 2:
            return float(self.series(name).mean()) if len(at) else 0.0
        return float((self.series(name)[:-1] * np.diff(at)).sum() / (at[-1] - at[0]))

    def _note(self, gaps: Float64, counts: Int64) -> None:
        self._gaps.append(gaps)
        self._counts.append(counts)


def add(total: dict[str, Number], more: Mapping[str, Number]) -> None:
    """Sum by name, in place."""
    for name, n in more.items():
        total[name] = (total[name] + n) if name in total else n
