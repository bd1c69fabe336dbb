"""Whether there is room in the pool for what sequences would do next: the scheduler's questions, asked of `Pool.plan`.

`running` are sequences with a row; `chunks[i]` tokens are what the i-th of them would go on by, 0 for not now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.prefix import PrefixCache
from isthmus.engine.placement import Placement
from isthmus.engine.running import Running
from isthmus.engine.sequence import Sequence
from isthmus.memory import Plan, Pool, Refusal

Int64 = NDArray[np.int64]
_NOTHING: Mapping[str, int] = {}
_REDO = 16  # a step of one sequence is worth computing this many tokens again; docs/request.md has the simulation
_MOMENTS = 16  # at most, that are looked at in the time ahead
_MEMORY = 16_384  # tokens sampled until an end counts for 1/e of a new one


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
        self._generated = 0  # tokens sampled since the start
        self._recent_tokens = 0.0  # of them, those of late: a token counts for less the longer ago it was
        self._recent_ends = 0.0  # sequences that one of these ended before their limit

    def plan(self, demand: Mapping[str, int], *, evict: bool = True) -> Plan | Refusal:
        """For exactly this, after evicting what must be evicted for it, if that may be."""
        plan = self._price(demand)
        if not plan and evict and self._cache is not None and self._cache.evict(demand, self._price):
            plan = self._price(demand)
        return plan

    def fits_ahead(self, running: Running, chunks: Items[int]) -> bool:
        """Also for all that each of them has, a page more, and what they grow to while those that start must stay?"""
        at, rows, past = running.at, running.rows, running.past
        length, most = at.length[rows], at.most_cached[rows]
        new = np.array(chunks, np.int64)
        now = self._placement.demand(rows, past, new)
        later = self._placement.demand(rows, past, np.maximum(np.minimum(length + self._page_size, most) - past, new))
        if not self._price({name: max(now[name], later[name]) for name in now}, self._placement.idle):
            return False
        horizon = int(length[~at.begun[rows]].max(initial=0)) // _REDO
        if horizon <= self._page_size:
            return True
        return self._fits_until(horizon, rows, past, length, most)

    def ended(self, generated: int, early: int) -> None:
        """Sequences ended, `early` of them before their limit, when `generated` tokens had been sampled in all."""
        new, self._generated = generated - self._generated, generated
        fade = math.exp(-new / _MEMORY)
        self._recent_tokens = self._recent_tokens * fade + new
        self._recent_ends = self._recent_ends * fade + early

    def shrink(self, running: Items[Sequence], chunks: list[int]) -> bool:
        """Cut the youngest prefill chunk that can be cut to what fits, or as far as it goes. False if none can."""
        i = max((i for i, n in enumerate(chunks) if n > 1), default=None)
        if i is None:
            return False
        rows, past, new = rows_of(running), past_of(running), np.array(chunks, np.int64)
        low, high = (0 if 0 < i == len(chunks) - 1 else 1), chunks[i] - 1
        while low < high:
            new[i] = middle = (low + high + 1) // 2
            if self._price(self._placement.demand(rows, past, new), self._placement.idle):
                low = middle
            else:
                high = middle - 1
        chunks[i] = low
        return True

    def _fits_until(self, horizon: int, rows: Int64, past: Int64, length: Int64, most: Int64) -> bool:
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
        gains = self._placement.outlook(rows, past, length + np.minimum(left, steps), alive)
        # One arena is fullest where the bytes peak; a wall or the cap on tokens, where its group does.
        groups = self._pool.groups
        size = sum((gain * groups[name].spec.page_bytes for name, gain in gains.items()), np.zeros_like(moments))
        fullest = {int(size.argmax()), *(int(gain.argmax()) for gain in gains.values())}
        return all(self._fits_with({name: int(gain[i]) for name, gain in gains.items()}) for i in fullest)

    def _fits_with(self, gain: Mapping[str, int]) -> bool:
        """Would so many pages more per group fit, or fewer where it is below 0?"""
        idle, live = self._placement.idle, self._pool.regions
        # Expected, so rounded; nor is a page that the last of several gives back known to be theirs.
        back = {name: min(live[name].live, idle.get(name, 0) + max(0, -pages)) for name, pages in gain.items()}
        return bool(self._price({name: max(0, pages) for name, pages in gain.items()}, back))

    def _price(self, demand: Mapping[str, int], release: Mapping[str, int] = _NOTHING) -> Plan | Refusal:
        """The pool's answer, under the cap; `release` as in `Pool.plan`."""
        plan = self._pool.plan(demand, release)
        if self._most_pages is not None and isinstance(plan, Plan):
            cover = self._pool.covering["tokens"][0]
            pages = self._pool.ids("tokens").live + demand.get(cover, 0) - release.get(cover, 0)
            if pages > self._most_pages:
                return Refusal(demand, 0, f"{pages:,} pages of tokens would be cached, over --max-total-tokens")
        return plan


def rows_of(sequences: Items[Sequence]) -> Int64:
    """The row of each."""
    return np.array([s.row for s in sequences], np.int64)


def past_of(sequences: Items[Sequence]) -> Int64:
    """Tokens cached of each."""
    return np.array([s.past for s in sequences], np.int64)
