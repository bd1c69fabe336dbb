"""Whether there is room in the pool for what sequences would do next: the scheduler's questions, asked of `Pool.plan`.

`running` are sequences with a row; `chunks[i]` tokens are what the i-th of them would go on by, 0 for not now.
"""

from __future__ import annotations

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

    def plan(self, running: Running, chunks: Int64) -> Plan | Refusal:
        """For exactly this, after evicting what must be evicted for it."""
        demand = self._placement.demand(running.rows, running.past, chunks)
        plan = self._price(demand)
        if not plan and self._cache is not None and self._cache.evict(demand, self._price):
            plan = self._price(demand)
        return plan

    def fits_ahead(self, running: Items[Sequence], chunks: Items[int]) -> bool:
        """Also for all that each of them has, and a page more?"""
        rows, past, new = rows_of(running), past_of(running), np.array(chunks, np.int64)
        length = np.array([s.length for s in running], np.int64)
        most = np.array([s.most_cached for s in running], np.int64)
        ahead = np.minimum(length + self._page_size, most) - past
        now = self._placement.demand(rows, past, new)
        later = self._placement.demand(rows, past, np.maximum(ahead, new))
        return bool(self._price({name: max(now[name], later[name]) for name in now}, self._placement.idle))

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
