"""The static walls that a given batch gets along with best, so that unified memory is compared with a good guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.dryrun import dry_steps
from isthmus.errors import ConfigError
from isthmus.memory import Group, Pool
from isthmus.params import RequestError

_STRIDE = 20  # a wall moves by this part of the arena

Walls = Mapping[str, int]
"""Bytes per group."""


@dataclass(frozen=True)
class Found:
    """The best walls, and how many steps the batch takes by a dry run of the real scheduler."""

    walls: Walls
    steps: int  # under these walls
    unified_steps: int  # without walls


def best_walls(
    groups: Sequence[Group], arena_bytes: int, config: SchedulerConfig, lengths: Sequence[tuple[int, int]]
) -> Found:
    """Walls under which a batch of `(prompt, output)` tokens, all there from the start, takes the fewest steps.

    Starts from `capacity.best_walls` and, with two groups, shifts the wall by a twentieth of the arena as long as the
    steps become fewer: a handful of dry runs, where trying every division takes too long for a large batch. Ends at
    once where the batch takes as few steps as without walls.

    ConfigError if there is nothing to split, or no split holds every request.
    """
    if len(groups) < 2:
        raise ConfigError("the model has one kind of cache: there is nothing to split, leave out --against-static")
    unified = dry_steps(Pool(arena_bytes, groups), config, lengths)
    walls: Walls = capacity.best_walls(groups, arena_bytes, lengths)
    best = dry_steps(Pool(arena_bytes, groups, walls=walls), config, lengths)
    if len(groups) == 2:
        for sign in (1, -1):
            while best > unified:
                shifted = _shift(walls, sign * arena_bytes // _STRIDE)
                steps = _steps(groups, arena_bytes, config, lengths, shifted)
                if steps is None or steps >= best:
                    break
                walls, best = shifted, steps
    return Found(walls, best, unified)


def _shift(walls: Walls, size: int) -> Walls:
    first, second = walls
    return {first: walls[first] + size, second: walls[second] - size}


def _steps(
    groups: Sequence[Group],
    arena_bytes: int,
    config: SchedulerConfig,
    lengths: Sequence[tuple[int, int]],
    walls: Walls,
) -> int | None:
    """None if some request does not fit at all."""
    if min(walls.values()) <= 0:
        return None
    try:
        return dry_steps(Pool(arena_bytes, groups, walls=walls), config, lengths)
    except RequestError:
        return None
