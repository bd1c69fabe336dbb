"""Whether there is room in the pool for what sequences would do next: the scheduler's questions, asked of `Pool.plan`.

`running` are sequences with a row; `chunks[i]` tokens are what the i-th of them would go on by, 0 for not now. Those
that wait are priced as they stand, without a row or a page: most are refused, step after step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.prefix import Match, PrefixCache
from isthmus.engine.placement import Held, Placement
from isthmus.engine.running import Running
from isthmus.engine.sequence import Sequence
from isthmus.memory import Plan, Pool, Refusal

Int64 = NDArray[np.int64]
_NOTHING: Mapping[str, int] = {}
_NOBODY = np.zeros(0, np.int64)
_REDO = 16  # a step of one sequence is worth computing this many tokens again; docs/request.md has the simulation
_MOMENTS = 16  # at most, that are looked at in the time ahead
_MEMORY = 16_384  # tokens sampled until an end counts for 1/e of a new one


@dataclass(eq=False, slots=True)
class Newcomer:
    """A waiting sequence, and how it would start."""

    sequence: Sequence
    match: Match | None
    length: int
    most_cached: int
    chunk: int  # tokens in its first step
    pages: Mapping[str, int] | None = None  # per group that it lacks for what it has, and a page more; once asked for

    @classmethod
    def of(cls, sequence: Sequence, match: Match | None, chunk: int) -> Newcomer:
        """As the sequence stands."""
        return cls(sequence, match, sequence.length, sequence.most_cached, chunk)

    @property
    def columns(self) -> int:
        """Pages of the hit."""
        return 0 if self.match is None else self.match.columns


class Room:
    """One pool under a cap on cached tokens.

    Args:
        cache: evicts for a plan, and counts as room where it could; None: there is none.
        page_size: tokens of a column.
        max_cached_tokens: cap on what all sequences cache together, in whole pages; None: what the pool holds.
    """

    def __init__(
        self,
        pool: Pool,
        placement: Placement,
        cache: PrefixCache | None,
        page_size: int,
        max_cached_tokens: int | None,
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._cache = cache
        self._page_size = page_size
        capped = max_cached_tokens is not None and "tokens" in pool.covering
        self._most_pages = (max_cached_tokens or 0) // page_size if capped else None
        self._asked: Newcomer | None = None  # what was asked for last
        self._generated = 0  # tokens sampled since the start
        self._recent_tokens = 0.0  # of them, those of late: a token counts for less the longer ago it was
        self._recent_ends = 0.0  # sequences that one of these ended before their limit

    def plan(self, demand: Mapping[str, int]) -> Plan | Refusal:
        """For exactly this, after evicting what must be evicted for it."""
        plan = self._pool.plan(demand)
        over = self._over_cap(demand)
        if isinstance(plan, Plan) and not over:
            return plan
        self._placement.unlock_passed()
        if self._cache is not None and self._cache.evict(demand, self._price):
            return self._pool.plan(demand)
        if isinstance(plan, Plan):
            return Refusal(
                demand,
                0,
                f"{over + (self._most_pages or 0):,} pages of tokens would be cached, {over:,} more than "
                "--max-total-tokens allows",
            )
        return plan

    def newcomer(self, sequence: Sequence, match: Match | None, chunk: int) -> Newcomer:
        """A waiting sequence that would start so. The one that was refused in the step before is mostly the one that
        is asked for again: what it lacks is not worked out anew."""
        last = self._asked
        if last is None or (last.sequence, last.length, last.chunk) != (sequence, sequence.length, chunk):
            last = None
        if last is None or last.match is not match:
            last = self._asked = Newcomer.of(sequence, match, chunk)
        return last

    def fits_ahead(self, running: Running, chunks: Int64, newcomers: Items[Newcomer] = ()) -> bool:
        """Also for all that each of them has, a page more, and what they grow to while those that start must stay?

        Newcomers would run beside them, and have no row. What one lacks itself is looked at first: that answers most
        steps in which somebody waits for memory, and costs the least.
        """
        idle = self._idle_beside(newcomers)
        if len(newcomers) == 1 and not self._price(self._pages(newcomers[0]), idle):
            return False
        at, rows = running.at, running.rows
        held = self._placement.held(rows, running.past, [new.columns for new in newcomers])
        more = np.array([(new.length, new.most_cached, new.chunk) for new in newcomers], np.int64).reshape(-1, 3).T
        length = np.concatenate((at.length[rows], more[0]))
        most = np.concatenate((at.most_cached[rows], more[1]))
        now = held.past + np.concatenate((chunks, more[2]))
        later = np.maximum(np.minimum(length + self._page_size, most), now)
        gains = self._placement.gains(held, np.stack((now, later)))
        if not self._price({name: int(np.add.reduce(gain, 1).max()) for name, gain in gains.items()}, idle):
            return False
        begun = at.begun[rows]
        longest = 0 if np.count_nonzero(begun) == len(begun) else int(at.length[rows[~begun]].max())
        horizon = max([longest, *(new.length for new in newcomers)]) // _REDO
        return horizon <= self._page_size or self._fits_until(horizon, held, length, most, idle)

    def ended(self, generated: int, early: int) -> None:
        """Sequences ended, `early` of them before their limit, when `generated` tokens had been sampled in all."""
        new, self._generated = generated - self._generated, generated
        fade = math.exp(-new / _MEMORY)
        self._recent_tokens = self._recent_tokens * fade + new
        self._recent_ends = self._recent_ends * fade + early

    def shrink(self, running: Running, chunks: list[int]) -> bool:
        """Cut the youngest prefill chunk that can be cut to what fits, or as far as it goes. False if none can."""
        i = max((i for i, n in enumerate(chunks) if n > 1), default=None)
        if i is None:
            return False
        rows, past, new = running.rows, running.past, np.array(chunks, np.int64)
        low, high = (0 if 0 < i == len(chunks) - 1 else 1), chunks[i] - 1
        while low < high:
            new[i] = middle = (low + high + 1) // 2
            if self._price(self._placement.demand(rows, past, new), self._placement.idle):
                low = middle
            else:
                high = middle - 1
        chunks[i] = low
        return True

    def _fits_until(self, horizon: int, held: Held, length: Int64, most: Int64, idle: Mapping[str, int]) -> bool:
        """Will they fit, as far as one can tell, for so many steps in which each decodes a token and nobody starts?

        Memory peaks just before somebody reaches the limit, so it is these moments that are looked at, of many only
        some. Until then each ends with the same chance at every token: the rate at which others did lately.
        """
        left = np.clip(most - length, 0, horizon)
        moments = np.unique(left)
        if len(moments) > _MOMENTS:
            moments = moments[np.linspace(0, len(moments) - 1, _MOMENTS).round().astype(np.int64)]
        rate = self._recent_ends / self._recent_tokens if self._recent_tokens else 0.0
        steps = moments[:, None]
        alive = (steps <= left) * np.exp(-rate * steps)
        gains = self._placement.outlook(held, length + np.minimum(left, steps), alive)
        # One arena is fullest where the bytes peak; a wall or the cap on tokens, where its group does.
        groups = self._pool.groups
        size = sum((gain * groups[name].spec.page_bytes for name, gain in gains.items()), np.zeros_like(moments))
        fullest = {int(size.argmax()), *(int(gain.argmax()) for gain in gains.values())}
        return all(self._fits_with({name: int(gain[i]) for name, gain in gains.items()}, idle) for i in fullest)

    def _fits_with(self, gain: Mapping[str, int], idle: Mapping[str, int]) -> bool:
        """Would so many pages more per group fit, or fewer where it is below 0?"""
        live = self._pool.regions
        if min(gain.values()) >= 0:
            return self._price(gain, idle)
        # Expected, so rounded; nor is a page that the last of several gives back known to be theirs.
        back = {name: min(live[name].live, idle.get(name, 0) + max(0, -pages)) for name, pages in gain.items()}
        return self._price({name: max(0, pages) for name, pages in gain.items()}, back)

    def _pages(self, new: Newcomer) -> Mapping[str, int]:
        if new.pages is None:
            held = self._placement.held(_NOBODY, _NOBODY, [new.columns])
            end = np.maximum(min(new.length + self._page_size, new.most_cached), held.past + new.chunk)
            new.pages = {name: int(gain[0]) for name, gain in self._placement.gains(held, end).items()}
        return new.pages

    def _idle_beside(self, newcomers: Items[Newcomer]) -> Mapping[str, int]:
        """Pages per group that the prefix cache could give back, were these running."""
        idle = self._placement.idle
        hits = [new.match for new in newcomers if new.match is not None and new.match.columns]
        if not hits or self._cache is None:
            return idle
        taken = self._cache.would_lock(hits)
        return {name: pages - taken.get(name, 0) for name, pages in idle.items()}

    def _price(self, demand: Mapping[str, int], release: Mapping[str, int] = _NOTHING) -> bool:
        """Is there a plan, and is it under the cap? `release` as in `Pool.plan`."""
        return self._pool.could(demand, release) and not self._over_cap(demand, release)

    def _over_cap(self, demand: Mapping[str, int], release: Mapping[str, int] = _NOTHING) -> int:
        """So many pages of tokens more would be cached than may be."""
        if self._most_pages is None:
            return 0
        cover = self._pool.covering["tokens"][0]
        pages = self._pool.ids("tokens").live + demand.get(cover, 0) - release.get(cover, 0)
        return max(0, pages - self._most_pages)
