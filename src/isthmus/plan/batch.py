"""A workload through the real scheduler, without a model: steps under unified memory and under the best static split.

The search for the split starts from the one by arithmetic (`capacity.best_walls`) and shifts a twentieth of the arena
from one group to another as long as that takes fewer steps: a few dry runs, where trying every division takes too long
for a large batch. It ends at once where walls cost no step.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.dryrun import dry_steps
from isthmus.errors import ConfigError
from isthmus.memory import Group, Pool
from isthmus.params import RequestError
from isthmus.plan.workload import Workload

_STRIDE = 20  # a wall moves by this part of the arena

Walls = Mapping[str, int]
"""Bytes per group."""


@dataclass(frozen=True)
class Batch:
    """What came of it."""

    workload: str
    requests: int
    left_out: int  # that are longer than a sequence can be
    prompt_tokens: float  # mean
    output_tokens: float
    unified_steps: int
    unified_running: float  # output tokens a step, which is sequences that decode
    static_steps: int | None  # with the best of the splits that were tried; None if none holds every request
    static_running: float | None
    static_walls: Walls | None
    static_splits: int  # that were tried
    gain: float | None  # static steps for a unified one


class _DryRuns:
    """Dry runs of one batch, each counted on a terminal."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[Group], arena_bytes: int, workload: Workload) -> None:
        self._config, self._groups, self._arena_bytes, self._workload = config, groups, arena_bytes, workload
        self._bar = tqdm(desc="dry runs", unit="run", disable=None, leave=False)

    def unified(self) -> int:
        """Steps without walls. ConfigError if a request cannot fit the arena at all."""
        try:
            return self._steps(None)
        except RequestError as error:
            raise ConfigError(f"--workload {self._workload.text}: {error}") from error

    def best(self, enough: int) -> tuple[int, Walls, int] | None:
        """Steps and walls of the best static split, and how many were tried; None where none holds every request.

        No better one than `enough` steps is looked for.
        """
        try:
            walls: Walls = capacity.best_walls(self._groups, self._arena_bytes, self._workload.lengths)
        except ConfigError:  # some request is too long beside walls for the others
            return None
        best, tried = self._static(walls), 1
        assert best is not None, "every wall holds the longest request"
        better = True
        while better and best > enough:
            better = False
            for shifted in _shifts(walls, self._arena_bytes // _STRIDE):
                steps = self._static(shifted)
                tried += 1
                if steps is not None and steps < best:
                    walls, best, better = shifted, steps, True
                    break
        return best, walls, tried

    def close(self) -> None:
        """Take the counter away."""
        self._bar.close()

    def _static(self, walls: Walls) -> int | None:
        """None if some request does not fit these walls at all."""
        try:
            return self._steps(walls)
        except RequestError:
            return None

    def _steps(self, walls: Walls | None) -> int:
        self._bar.update()
        return dry_steps(Pool(self._arena_bytes, self._groups, walls=walls), self._config, self._workload.lengths)


def _shifts(walls: Walls, size: int) -> list[Walls]:
    """Each way to give so many bytes of one group to another."""
    pairs = itertools.permutations(walls, 2)
    return [{**walls, a: walls[a] + size, b: walls[b] - size} for a, b in pairs if walls[b] > size]


def run(config: SchedulerConfig, groups: Sequence[Group], arena_bytes: int, workload: Workload) -> Batch:
    """Every request is there from the start, and nothing is cached from one for another.

    ConfigError if a request cannot fit the arena at all.
    """
    outputs = sum(output for _, output in workload.lengths)
    runs = _DryRuns(config, groups, arena_bytes, workload)
    unified = runs.unified()
    steps, walls, tried = (runs.best(unified) if len(groups) > 1 else None) or (None, None, 0)
    runs.close()
    return Batch(
        workload=workload.text,
        requests=len(workload.lengths),
        left_out=workload.left_out,
        prompt_tokens=statistics.fmean(prompt for prompt, _ in workload.lengths),
        output_tokens=outputs / len(workload.lengths),
        unified_steps=unified,
        unified_running=outputs / unified,
        static_steps=steps,
        static_running=None if steps is None else outputs / steps,
        static_walls=walls,
        static_splits=tried,
        gain=None if steps is None else steps / unified,
    )
