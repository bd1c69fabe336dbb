"""A batch through the real scheduler without a model: how many steps it takes under which memory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request
from isthmus.errors import ConfigError
from isthmus.memory import Group, Pool
from isthmus.memory.group import null_bytes
from isthmus.params import RequestError, SamplingParams

Walls = Mapping[str, int]


def dry_steps(pool: Pool, config: SchedulerConfig, lengths: Sequence[tuple[int, int]]) -> int:
    """Steps until sequences of `(prompt, output)` tokens, all there from the start, are complete.

    RequestError if one of them cannot fit the pool at all.
    """
    scheduler = Scheduler(pool, config, max_model_len=max(p + o for p, o in lengths))
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add(Request(str(i), [1] * prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
    while (step := scheduler.schedule()) is not None:
        scheduler.settle(step, [0] * len(step.samples))
    return scheduler.counters.steps


def ranked_walls(
    groups: Sequence[Group], arena_bytes: int, config: SchedulerConfig, lengths: Sequence[tuple[int, int]]
) -> list[tuple[int, dict[str, int]]]:
    """`(steps, bytes per group)` of every static split that holds a batch, fewest steps first.

    Tries every division of the arena into twentieths (eighths for more than two groups). ConfigError if none holds
    every request.
    """
    found: list[tuple[int, dict[str, int]]] = []
    for walls in divisions(groups, arena_bytes, 20 if len(groups) <= 2 else 8):
        try:
            found.append((dry_steps(Pool(arena_bytes, groups, walls=walls), config, lengths), walls))
        except RequestError:
            continue  # some request does not fit these walls at all
    if not found:
        raise ConfigError(f"no static split of {arena_bytes:,} bytes holds every request: raise --pool-bytes")
    return sorted(found, key=lambda ranked: ranked[0])


def divisions(groups: Sequence[Group], arena_bytes: int, parts: int) -> Iterator[dict[str, int]]:
    """Every way to deal `parts` equal parts of the arena to the groups, at least one each."""
    usable = arena_bytes - null_bytes(groups)

    def deal(names: Sequence[str], left: int) -> Iterator[dict[str, int]]:
        if len(names) == 1:
            yield {names[0]: left * usable // parts}
            return
        for mine in range(1, left - len(names) + 2):
            for rest in deal(names[1:], left - mine):
                yield {names[0]: mine * usable // parts} | rest

    yield from deal([group.name for group in groups], parts)
