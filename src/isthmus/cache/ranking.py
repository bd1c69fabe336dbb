"""The order in which cached things are evicted, and what evicting the first of them gives back.

A candidate is something whose lock nobody holds: a node's id with all it holds (in a chain only after its children),
a node's page in one window group, a snapshot. A ranking is made once and eaten from the front over many evictions:
what was used since is passed over, so it gets old but never wrong. `PrefixCache` decides when to make a new one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from isthmus.cache.holdings import Bool, Holdings
from isthmus.cache.nodes import Slots
from isthmus.cache.worth import worth


class Batch:
    """Candidates in order, and which pages each of them frees that none before it does."""

    def __init__(self, holdings: Holdings, slots: Slots, lock: Slots, good: Bool) -> None:
        """`lock[i]` is the index in `Roles.locks` of what candidate i takes; only `good` ones free anything."""
        self.slots = slots
        self._lock = lock
        self._roles = roles = holdings.roles
        ids = self._sort(roles.covering[0]) if roles.covering else np.zeros(len(slots), np.bool_)
        self._frees: dict[str, Bool] = {}
        for name in roles.page_bytes:
            takers = ids if name in roles.covering else ids | self._sort(roles.counted(name)[0])
            takers = takers & good & holdings.bound(name, slots)
            if name in roles.states:
                takers &= holdings.unused(roles.states[0], slots)
            self._frees[name] = _first(slots, takers, holdings.nodes.top)
        self._total = {name: np.cumsum(frees) for name, frees in self._frees.items()}

    def __len__(self) -> int:
        return len(self.slots)

    def pages(self, n: int) -> dict[str, int]:
        """Pages per group that the first n candidates give back."""
        return {name: int(total[n - 1]) if n else 0 for name, total in self._total.items()}

    def freed(self, n: int, group: str) -> Slots:
        """The nodes, in order, whose page in a group the first n candidates give back."""
        return self.slots[:n][self._frees[group][:n]]

    def _sort(self, lock: str) -> Bool:
        mine: Bool = self._lock == self._roles.locks.index(lock)
        return mine


class Ranking:
    """Candidates by worth, least first; of equals the least recently used; then from the leaves up."""

    def __init__(self, holdings: Holdings, clock: int, lookups: int) -> None:
        """`clock` stands now and counts every use; so many `lookups` were among them, evenly spread."""
        self._holdings = holdings
        self._clock = clock
        self._next = 0
        nodes, roles = holdings.nodes, holdings.roles
        every = np.arange(nodes.top)
        bound = {name: holdings.bound(name, every) for name in roles.page_bytes}
        last = np.minimum(nodes.last[: nodes.top], clock)
        value = worth(nodes, roles, bound, (clock - last) * (lookups / max(1, clock)))
        found, ranks = [], []
        for name in roles.locks:
            at = np.flatnonzero(bound[name] & holdings.unused(name, every))
            found.append(at)
            ranks.append(value[name][at])
        slots, rank = np.concatenate(found), np.concatenate(ranks)
        lock = np.repeat(np.arange(len(found)), [len(at) for at in found])
        order = np.argsort(last[slots] * nodes.top - nodes.depth[slots], kind="stable")
        order = order[np.argsort(rank[order], kind="stable")]
        self._slots, self._lock = slots[order], lock[order]

    def batches(self) -> Iterator[Batch]:
        """The first few candidates, then four times as many from the same start, and so on up to all of them."""
        size = 64
        while True:
            rows = slice(self._next, self._next + size)
            slots = self._slots[rows]
            yield Batch(self._holdings, slots, self._lock[rows], self._holdings.nodes.last[slots] <= self._clock)
            if rows.stop >= len(self._slots):
                return
            size *= 4

    def drop(self, n: int) -> None:
        """The first n candidates are gone."""
        self._next += n


def _first(slots: Slots, takers: Bool, top: int) -> Bool:
    """Of the rows that take something of a node, the first one for each node; nodes are below `top`."""
    rows = takers.nonzero()[0][::-1]
    nodes, row = slots[rows], np.zeros(top, np.int64)
    row[nodes] = rows  # of equals the last stays, which is the first here
    first = np.zeros(len(slots), np.bool_)
    first[rows] = row[nodes] == rows
    return first
