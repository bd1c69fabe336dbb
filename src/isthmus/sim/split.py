"""The static split that serves a workload best, by search.

    coarse     every division of the arena into `parts` equal parts
    refine     from the best: half a part from one group to another, then a quarter

Each trial is the whole simulation under walls. Better is more goodput; of equals, requests that end sooner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from isthmus.engine.dryrun import divisions
from isthmus.memory.group import null_bytes
from isthmus.sim.arrivals import Arrival
from isthmus.sim.simulation import Setup, Simulation
from isthmus.sim.summary import Limits, score

Walls = dict[str, int]
_PARTS = {2: 8, 3: 7}
_MANY = 6  # parts for more groups than that


@dataclass(frozen=True)
class Trial:
    """Walls and what came of them on the sample."""

    walls: Walls
    goodput: float
    mean_e2e: float

    @property
    def rank(self) -> tuple[float, float]:
        """The higher the better."""
        return self.goodput, -self.mean_e2e


def search(setup: Setup, sample: Sequence[Arrival], limits: Limits, note: Callable[[int], None]) -> list[Trial]:
    """All walls that were tried, best first. `note` is told how many requests more are over."""
    groups = setup.model.groups
    parts = _PARTS.get(len(groups), _MANY)
    tried: dict[tuple[int, ...], Trial] = {}

    def attempt(walls: Walls) -> Trial:
        key = tuple(walls.values())
        if key not in tried:
            outcome = Simulation(setup, walls, note=note).run(sample)
            goodput, late = score(outcome, limits)
            tried[key] = Trial(walls, goodput, -late)
        return tried[key]

    best = max((attempt(walls) for walls in divisions(groups, setup.arena_bytes, parts)), key=lambda trial: trial.rank)
    part = (setup.arena_bytes - null_bytes(groups)) // parts
    for size in (part // 2, part // 4):
        better = max((attempt(walls) for walls in _shifts(best.walls, size)), key=lambda t: t.rank, default=best)
        best = max(best, better, key=lambda trial: trial.rank)
    return sorted(tried.values(), key=lambda trial: trial.rank, reverse=True)


def trials(groups: int) -> int:
    """How many walls a search tries at most."""
    parts = _PARTS.get(groups, _MANY)
    coarse = sum(1 for cut in itertools.combinations(range(1, parts), groups - 1))
    return coarse + 2 * groups * (groups - 1)


def _shifts(walls: Walls, size: int) -> Iterator[Walls]:
    """So many bytes from one group to another, where the first keeps some."""
    for giver, taker in itertools.permutations(walls, 2):
        if walls[giver] > size:
            yield walls | {giver: walls[giver] - size, taker: walls[taker] + size}
