"""Which ids the prefix cache owns, which of them sequences use, and how many pages it could give back.

A live id belongs to the cache or to one sequence, never to both and never to nobody:

    slot_of[space][id] = slot > 0  <=>  the id is the node's page (or its snapshot)
    locks[name][id] = sequences that may still read the id's page there; 0 unless the cache owns the id
    idle[group] = pages in the group whose id the cache owns and whose lock there is 0
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.nodes import Nodes, Slots
from isthmus.cache.roles import Roles
from isthmus.memory import Pool

Ids = NDArray[np.integer]
Bool = NDArray[np.bool_]
_ONE = np.int32(1)  # of the locks' own type, which NumPy adds at once


class Holdings:
    """Ownership and locks. Changes nothing in the pool."""

    def __init__(self, pool: Pool, roles: Roles) -> None:
        self.pool = pool
        self.roles = roles
        self.nodes = Nodes()
        self.slot_of = {name: np.zeros(ids.capacity + 1, np.int32) for name, ids in pool.spaces.items()}
        self.locks = {name: np.zeros(len(pool.table(name)), np.int32) for name in roles.locks}
        self.idle = dict.fromkeys(pool.groups, 0)
        self._mark = {name: np.empty(ids.capacity + 1, np.int32) for name, ids in pool.spaces.items()}  # scratch

    def space(self, group: str) -> str:
        """The id space of a group."""
        return self.pool.groups[group].space

    def ids(self, group: str, slots: Slots) -> Slots:
        """The id that names what these nodes hold in the group; 0 for nothing."""
        return (self.nodes.page if self.space(group) == "tokens" else self.nodes.snapshot)[slots]

    def bound(self, group: str, slots: Slots) -> Bool:
        """Do these nodes hold a page in the group?"""
        return self.pool.is_bound(group, self.ids(group, slots))

    def unused(self, lock: str, slots: Slots) -> Bool:
        """Does no sequence hold this lock on the nodes?"""
        free: Bool = self.locks[lock][self.ids(lock, slots)] == 0
        return free

    def is_idle(self, group: str, ids: Ids) -> Bool:
        """Which of these ids of pages in the group are the cache's and locked by nobody: `idle` counts them."""
        lock = next(lock for lock in self.roles.locks if group in self.roles.counted(lock))
        found: Bool = (self.slot_of[self.space(group)][ids] > 0) & (self.locks[lock][ids] == 0)
        return found

    def adopt(self, space: str, ids: Ids, slots: Slots, *, locked: bool = False) -> None:
        """Private ids become the cache's, as what these nodes hold. `locked`: a sequence uses each of them, in every
        group; else nobody does."""
        assert not np.count_nonzero(self.slot_of[space][ids]), f"an id of {space!r} is the cache's already"
        (self.nodes.page if space == "tokens" else self.nodes.snapshot)[slots] = ids
        self.slot_of[space][ids] = slots
        for lock in self.roles.locks:
            if self.space(lock) != space:
                continue
            if locked:
                self.locks[lock][ids] = 1
            else:
                self._tally(lock, ids, 1)

    def disown(self, space: str, slots: Slots) -> Slots:
        """Ids that no one has locked are the cache's no more, and the nodes hold nothing there. Returns them."""
        column = self.nodes.page if space == "tokens" else self.nodes.snapshot
        ids = column[slots]
        for lock in self.roles.locks:
            if self.space(lock) == space:
                assert not self.locks[lock][ids].any(), f"a locked id of {space!r} was to be evicted"
                self._tally(lock, ids, -1)
        self.slot_of[space][ids] = 0
        column[slots] = 0
        return ids

    def forget(self, group: str, slots: Slots) -> Slots:
        """Count out pages of a window group that are about to be unbound. Returns their ids."""
        ids = self.nodes.page[slots]
        assert not self.locks[group][ids].any(), f"a locked page of {group!r} was to be evicted"
        self.idle[group] -= len(ids)
        return ids

    def newly(self, lock: str, ids: Ids) -> dict[str, int]:
        """Pages per group that these ids hold and nobody has locked; an id may stand here for several sequences."""
        free = self._distinct(lock, ids[self.locks[lock][ids] == 0])
        return {name: self._count(name, free) for name in self.roles.counted(lock)}

    def lock(self, name: str, ids: Ids) -> None:
        """One more sequence uses each of these; an id may stand here for several sequences."""
        locks = self.locks[name]
        self._tally(name, self._distinct(name, ids[locks[ids] == 0]), -1)
        np.add.at(locks, ids, _ONE)

    def unlock(self, name: str, ids: Ids) -> None:
        """One sequence less uses each of these."""
        locks = self.locks[name]
        np.subtract.at(locks, ids, _ONE)
        left = locks[ids]
        assert not np.count_nonzero(left < 0), f"a page of {name!r} was unlocked more often than locked"
        self._tally(name, self._distinct(name, ids[left == 0]), 1)

    def bury(self) -> Slots:
        """Forget ids that died in other hands, which is always a fault, and count anew. Returns their nodes."""
        buried = [np.zeros(0, np.int64)]
        for space, slot_of in self.slot_of.items():
            owned = np.flatnonzero(slot_of)
            dead = owned[~self.pool.ids(space).is_live(owned)]
            buried.append(slot_of[dead].astype(np.int64))
            (self.nodes.page if space == "tokens" else self.nodes.snapshot)[buried[-1]] = 0
            slot_of[dead] = 0
            for lock in self.roles.locks:
                if self.space(lock) == space:
                    self.locks[lock][dead] = 0
        self.idle = self._count_idle()
        return np.concatenate(buried)

    def check(self) -> None:
        """Assert the equations at the top of this file, and what locks say about chains."""
        nodes, live = self.nodes, self.nodes.live()
        nodes.check()
        for space, column in (("tokens", nodes.page), ("states", nodes.snapshot)):
            assert not column[0]
            if space not in self.slot_of:
                continue
            holding = live[column[live] > 0]
            owned = np.flatnonzero(self.slot_of[space])
            assert np.array_equal(np.sort(column[holding]), owned), f"prefix cache: ids of {space!r} and nodes disagree"
            named = self.slot_of[space][column[holding]]
            assert np.array_equal(named, holding), f"prefix cache: an id of {space!r} names another node"
            assert self.pool.ids(space).is_live(owned).all(), f"prefix cache: a dead id of {space!r}"
        for lock, counts in self.locks.items():
            owned = np.flatnonzero(self.slot_of[self.space(lock)])
            assert np.isin(np.flatnonzero(counts), owned).all(), f"prefix cache: a lock of {lock!r} on a foreign id"
        idle = self._count_idle()
        assert idle == self.idle, f"prefix cache: {self.idle} idle pages counted, {idle} there"
        for window in self.roles.windows:
            whole = self.locks[self.roles.covering[0]]
            assert (self.locks[window] <= whole).all(), f"prefix cache: a page of {window!r} is locked, its id is not"
        if self.roles.chained:
            self._check_chains(live)

    def _check_chains(self, live: Slots) -> None:
        nodes, locks = self.nodes, self.locks[self.roles.covering[0]]
        assert nodes.page[live].all(), "prefix cache: a node of a chain without a page"
        below = live[nodes.depth[live] > 1]
        parents = nodes.parent[below]
        used, above = locks[nodes.page[below]], locks[nodes.page[parents]]
        assert (above >= used).all(), "prefix cache: a locked node below one that is not"
        later = (nodes.last[parents] >= nodes.last[below]) | (above > 0)
        assert later.all(), "prefix cache: a node was used after its parent"

    def _count_idle(self) -> dict[str, int]:
        idle = dict.fromkeys(self.idle, 0)
        for lock, counts in self.locks.items():
            owned = np.flatnonzero(self.slot_of[self.space(lock)])
            for group in self.roles.counted(lock):
                idle[group] = int(self.pool.is_bound(group, owned[counts[owned] == 0]).sum())
        return idle

    def _distinct(self, lock: str, ids: Ids) -> Ids:
        """Each id once, in no order that matters. (NumPy would sort, or hash.)"""
        mark, order = self._mark[self.space(lock)], np.arange(len(ids), dtype=np.int32)
        mark[ids] = order
        distinct: Ids = ids[mark[ids] == order]
        return distinct

    def _tally(self, lock: str, ids: Ids, sign: int) -> None:
        for group in self.roles.counted(lock) if len(ids) else ():
            self.idle[group] += sign * self._count(group, ids)

    def _count(self, group: str, ids: Ids) -> int:
        """Pages that these ids hold in the group."""
        everyone = group in self.roles.covering or group in self.roles.states
        return len(ids) if everyone else int(np.count_nonzero(self.pool.is_bound(group, ids)))
