"""What fits an arena, asked of the pool and priced by the cache kinds: the numbers of admission and certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.cache import kind_of
from isthmus.errors import ConfigError
from isthmus.memory import Group, Pool
from isthmus.memory.group import null_bytes


def page_size(groups: Iterable[Group]) -> int:
    """Tokens per page of the token groups, which share their ids and therefore their page size; 1 if there are none."""
    sizes = {group.spec.page_size for group in groups if group.space == "tokens"}
    assert len(sizes) <= 1, f"token groups of one model need one page size, not {sorted(sizes)}"
    return sizes.pop() if sizes else 1


def peaks(groups: Iterable[Group], length: int) -> list[dict[str, int]]:
    """Pages that a sequence alone needs to be cached up to `length` >= 1 tokens, fed token by token.

    Several vectors, each of which must fit at its time: windows are widest just before a page ends, the full
    groups at the very end. Larger chunks need more for a moment, and the scheduler cuts them when it must.
    The last page's worth of steps holds every worst case: an earlier step has the same phase and no more pages.
    Windows are priced with the boundary that a prefix cache keeps, at most a page more than without one.
    """
    members = list(groups)
    past = np.arange(max(0, length - page_size(members)), length, dtype=np.int64)
    held = np.stack([kind_of(g, keep_boundary=True).held(past, np.ones_like(past)) for g in members], axis=1)
    return [dict(zip((g.name for g in members), map(int, row), strict=True)) for row in np.unique(held, axis=0)]


def fits(pool: Pool, length: int, count: int = 1, most: int | None = None) -> bool:
    """Would so many sequences of `length` cached tokens fit the empty pool together, under a cap on cached tokens?"""
    demands = [{name: n * count for name, n in peak.items()} for peak in peaks(pool.groups.values(), length)]
    return all(_within(pool, demand, most) and pool.fits(demand) for demand in demands)


def longest(pool: Pool, cap: int, most: int | None = None) -> int:
    """Most tokens, up to `cap`, that one sequence alone can have cached; 0 if not even one fits."""
    return _largest(cap, lambda length: fits(pool, length, most=most))


def concurrent(pool: Pool, length: int, most: int | None = None) -> int:
    """How many sequences of `length` cached tokens fit the empty pool together."""
    smallest = min(group.spec.page_bytes for group in pool.groups.values())
    return _largest(pool.arena_bytes // smallest, lambda count: fits(pool, length, count, most))


def total_tokens(pool: Pool, length: int, most: int | None = None) -> int:
    """Tokens cached when the empty pool is filled with sequences of `length` tokens and one shorter one."""
    count = concurrent(pool, length, most)
    whole = peaks(pool.groups.values(), length)

    def fits_beside(extra: int) -> bool:
        last = peaks(pool.groups.values(), extra)
        demands = [{name: count * w[name] + x[name] for name in w} for w in whole for x in last]
        return all(_within(pool, demand, most) and pool.fits(demand) for demand in demands)

    return count * length + _largest(length - 1, fits_beside)


@dataclass(frozen=True)
class Obstacle:
    """Why a sequence does not fit an empty pool: it needs `text`; `remedy` says what to do."""

    text: str
    remedy: str


def obstacle(pool: Pool, length: int, most: int | None = None) -> Obstacle:
    """What stands against one sequence of `length` cached tokens, which does not fit: the cap, a wall or the arena."""
    demands = peaks(pool.groups.values(), length)
    if not all(_within(pool, demand, most) for demand in demands):
        size = page_size(pool.groups.values())
        pages = max(demand[pool.covering["tokens"][0]] for demand in demands)
        return Obstacle(
            f"{pages:,} pages of {size} tokens, over --max-total-tokens {most:,}", "raise --max-total-tokens"
        )
    for name, wall in (pool.walls or {}).items():
        region, pages = pool.regions[name], max(demand[name] for demand in demands)
        if pages > region.last - region.first:
            need = pages * pool.groups[name].spec.page_bytes
            text = f"{need:,} bytes of pages of group {name}, which do not fit its wall of {wall:,} bytes"
            return Obstacle(text, f"raise --pool-bytes or the share of {name} in --static-split")
    need = peak_bytes(pool.groups, length)
    text = f"{need:,} bytes of pages at once, which do not fit the arena of {pool.arena_bytes:,} bytes"
    return Obstacle(text, "raise --pool-bytes")


def _within(pool: Pool, demand: Mapping[str, int], most: int | None) -> bool:
    """Do these pages hold at most so many tokens? Counted in ids of the token space, as the scheduler does."""
    if most is None or "tokens" not in pool.covering:
        return True
    return demand[pool.covering["tokens"][0]] <= most // page_size(pool.groups.values())


def peak_bytes(groups: Mapping[str, Group], length: int) -> int:
    """Bytes of pages that one sequence of `length` cached tokens needs at its worst moment."""
    sizes = {name: group.spec.page_bytes for name, group in groups.items()}
    return max(sum(n * sizes[name] for name, n in peak.items()) for peak in peaks(groups.values(), length))


def best_walls(groups: Sequence[Group], arena_bytes: int, lengths: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Bytes per group for static memory that let most sequences of a workload run together.

    Args:
        lengths: `(prompt, output)` tokens of the workload's requests. Requests are weighted by their output, the
            time they stay; each by its mean over that time. Every wall holds at least the longest request alone.

    ConfigError if the arena does not hold the longest request at all.
    """
    null = null_bytes(groups)
    usable = arena_bytes - null
    most = max(prompt + output for prompt, output in lengths)
    worst = peaks(groups, most)
    # The grids of two borders cost up to two pages.
    least = {g.name: (max(peak[g.name] for peak in worst) + 2) * g.spec.page_bytes for g in groups}
    if sum(least.values()) > usable:
        raise ConfigError(
            f"an arena of {arena_bytes:,} bytes cannot be split so that a request of {most:,} tokens fits: "
            f"it needs {sum(least.values()) + null:,} bytes: raise --pool-bytes or lower --static-workload"
        )
    mean = {group.name: _mean_bytes(group, lengths) for group in groups}
    walls: dict[str, int] = {}
    open_names = [group.name for group in groups]  # in order: sums of floats depend on it
    # Whoever's share is below its least gets that; the others divide what is left.
    while open_names:
        left = usable - sum(walls.values())
        weight = sum(mean[name] for name in open_names)
        share = {name: int(left * mean[name] / weight) for name in open_names}
        short = [name for name in open_names if share[name] < least[name]]
        walls |= {name: least[name] for name in short} if short else share
        open_names = [name for name in open_names if short and name not in short]
    return {group.name: walls[group.name] for group in groups}


def split_walls(groups: Sequence[Group], arena_bytes: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Bytes per group from given shares of the arena. ConfigError unless each group has one."""
    names = [group.name for group in groups]
    if set(shares) != set(names):
        raise ConfigError(f"--static-split must give a share to each of {', '.join(names)}, not {', '.join(shares)}")
    usable = max(0, arena_bytes - null_bytes(groups))
    walls = {name: int(usable * shares[name]) for name in names}
    widest = max(walls, key=lambda name: walls[name])
    walls[widest] -= max(0, sum(walls.values()) - usable)  # shares that sum to 1 may be more by a rounding error
    return walls


def _mean_bytes(group: Group, lengths: Sequence[tuple[int, int]]) -> float:
    kind = kind_of(group)
    pages = steps = 0
    for prompt, output in lengths:
        past = np.arange(prompt, prompt + output, dtype=np.int64)
        pages += int(kind.held(past, np.ones_like(past)).sum())
        steps += output
    return pages * group.spec.page_bytes / steps


def _largest(cap: int, holds: Callable[[int], bool]) -> int:
    """The largest n in [0, cap] with holds(n), for a predicate that is true up to some n."""
    low, high = 0, cap
    if high > 0 and holds(high):
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return max(low, 0)
