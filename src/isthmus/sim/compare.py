"""One workload under several memories: one arena, the best static split, the best of each trace alone, a given one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.engine import capacity
from isthmus.sim.simulation import Outcome, Setup, Simulation
from isthmus.sim.split import search, trials
from isthmus.sim.summary import Limits, score
from isthmus.sim.workload import Workload, phases

Note = Callable[[int], None]
"""Told how many requests more are over."""


@dataclass
class Comparison:
    """Sides are added one after the other.

    Args:
        sample: requests that a search sees.
        finalists: of a search, how many splits see the whole workload, so that the best of them is taken.
    """

    setup: Setup
    workload: Workload
    limits: Limits
    sample: int
    finalists: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    searches: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # per side, what was tried, best first

    def __post_init__(self) -> None:
        self._arrivals = self.workload.arrivals()

    def requests(self, memory: str, with_phases: bool, given: bool) -> int:
        """Requests of all runs together, at most: for a progress bar."""
        whole, tries = len(self._arrivals), trials(len(self.setup.model.groups))
        total = whole * ((memory != "static") + given)
        if memory == "both" or (memory == "static" and not given):
            total += tries * len(self.workload.sample(self.sample).arrivals()) + self.finalists * whole
            if with_phases:
                samples = (part.sample(self.sample) for _, part in phases(self.workload))
                total += sum(tries * len(part.arrivals()) + whole for part in samples)
        return total

    def unified(self, note: Note) -> None:
        """One arena for all groups."""
        self._run("unified", None, note)

    def best(self, note: Note) -> None:
        """The split that serves this workload best: of the finalists of a search and of whatever side is there."""
        tried = search(self.setup, self.workload.sample(self.sample).arrivals(), self.limits, note)
        self.searches["static best"] = [asdict(trial) for trial in tried]
        walls = [trial.walls for trial in tried[: self.finalists]]
        found = [Simulation(self.setup, one, note=note).run(self._arrivals) for one in walls]
        found += [outcome for outcome in self.outcomes.values() if outcome.walls is not None]
        self.outcomes["static best"] = max(found, key=lambda outcome: score(outcome, self.limits))

    def phases(self, note: Note) -> None:
        """The split that serves each trace best when it plays alone; then under all of them."""
        for name, part in phases(self.workload):
            tried = search(self.setup, part.sample(self.sample).arrivals(), self.limits, note)
            side = f"for {name[:14]}"
            self.searches[side] = [asdict(trial) for trial in tried]
            self._run(side, tried[0].walls, note)

    def given(self, shares: Mapping[str, float], note: Note) -> None:
        """The split that somebody asks about. ConfigError unless each group has a share."""
        setup = self.setup
        self._run("static given", capacity.split_walls(setup.model.groups, setup.arena_bytes, shares), note)

    def _run(self, side: str, walls: Mapping[str, int] | None, note: Note) -> None:
        self.outcomes[side] = Simulation(self.setup, walls, note=note).run(self._arrivals)
