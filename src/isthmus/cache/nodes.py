"""The nodes of the prefix cache as columns of numbers, so that thousands of them are weighed at once.

A node is a full page of some prefix, found by its name. It may hold a page of tokens and a snapshot of the states
after them; a node that holds neither is a mere mark that somebody was here, and lives while a child does.

    slot 0 is the root of all chains and no node; a slot is free <=> depth[slot] = 0
    depth[slot] = depth[parent[slot]] + 1                      every ancestor of a node is a node
    children[slot] = how many nodes have it as their parent
    a node without children holds a page or a snapshot
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max
_ROOT = b""  # what slot 0 is called; no node is


class Nodes:
    """All nodes of a cache. The columns are written by `PrefixCache`; chains grow and shrink here."""

    def __init__(self) -> None:
        self.top = 1  # slots [0, top) have been used
        self.parent = np.zeros(64, np.int64)  # slot
        self.depth = np.zeros(64, np.int64)  # columns up to and including this page: the boundary after it
        self.children = np.zeros(64, np.int64)
        self.page = np.zeros(64, np.int64)  # virtual id in the space "tokens", 0 = none (any more)
        self.snapshot = np.zeros(64, np.int64)  # virtual id in the space "states", 0 = none
        self.last = np.zeros(64, np.int64)  # clock of the last use; of a free slot: never
        self.restore = np.zeros(64, np.bool_)  # a boundary that somebody may come back to
        self._slot: dict[bytes, int] = {}
        self._name: list[bytes] = [_ROOT] * 64
        self._free: list[int] = []
        self._hidden = 0  # nodes that were hidden since the start

    def __len__(self) -> int:
        return len(self._slot)

    def find(self, names: Sequence[bytes]) -> Slots:
        """The slots of the longest known run at the start of a chain."""
        slots = self._find(names)
        unknown = slots == 0
        return slots[: unknown.argmax()] if unknown.any() else slots

    def get(self, name: bytes) -> int:
        """The slot of that name, 0 if there is none."""
        return self._slot.get(name, 0)

    def reach(self, names: Sequence[bytes], columns: int, clock: int) -> int:
        """The slot of `names[columns - 1]`, made with whatever ancestors are missing."""
        known = columns
        while known and names[known - 1] not in self._slot:
            known -= 1
        slot = self._slot[names[known - 1]] if known else 0
        for column in range(known, columns):
            slot = self._add(names[column], slot, column + 1, clock)
        return slot

    def reach_all(self, chains: Sequence[Sequence[bytes]], first: Slots, end: Slots, clock: int) -> Slots:
        """The slots of `chains[i][first[i]:end[i]]`, at least one of each, made with whatever ancestors are missing.

        The same as `reach` of one after the other.
        """
        starts, counts = first.tolist(), end - first
        if single := np.add.reduce(counts) == len(chains):  # what decodes bring
            names = [chain[start] for chain, start in zip(chains, starts, strict=True)]
        else:
            runs = zip(chains, starts, end.tolist(), strict=True)
            names = [name for chain, start, stop in runs for name in chain[start:stop]]
        slots = self._find(names)
        new = (slots == 0).nonzero()[0]
        fresh = names if len(new) == len(names) else [names[i] for i in new.tolist()]
        above = self._find([chain[start - 1] if start else _ROOT for chain, start in zip(chains, starts, strict=True)])
        orphans = np.count_nonzero((above == 0) & (first > 0))
        if orphans or len(set(fresh)) < len(fresh):  # of equals the second finds the first
            runs = zip(chains, starts, end.tolist(), strict=True)
            columns = ((chain, column) for chain, start, stop in runs for column in range(start + 1, stop + 1))
            return np.array([self.reach(chain, column, clock) for chain, column in columns], np.int64)
        if len(new):
            slots[new] = self._take(len(new))
            if single:
                parent, depth = above, end
            else:
                start = np.cumsum(counts) - counts
                depth = np.arange(len(slots)) + np.repeat(first - start, counts) + 1
                parent = np.concatenate(([0], slots[:-1]))
                parent[start] = above
            self._put(fresh, slots[new], parent[new], depth[new], clock)
        return slots

    def remove(self, slots: Slots) -> None:
        """Forget distinct nodes that hold nothing: with no children but one another, under parents that hold something.
        Where ids have died in other hands, which is a fault, neither need be so: then as far as `prune` goes."""
        parents, stays = self.parent[slots], np.ones(self.top, np.bool_)
        stays[slots] = False
        np.subtract.at(self.children, parents, 1)
        marks = (parents > 0) & (self.page[parents] == 0) & stays[parents]
        if np.count_nonzero(self.children[slots]) or np.count_nonzero(marks):
            np.add.at(self.children, parents, 1)
            for slot in slots.tolist():
                self.prune(slot)
            return
        gone = slots.tolist()
        for name in map(self._name.__getitem__, gone):
            del self._slot[name]
        self._free += gone
        self.parent[slots] = self.depth[slots] = 0
        self.restore[slots] = False
        self.last[slots] = _NEVER

    def prune(self, slot: int) -> None:
        """Forget a node that holds nothing and has no children; then its parent likewise, and so on."""
        while self.depth[slot] and not (self.children[slot] or self.page[slot] or self.snapshot[slot]):
            parent = int(self.parent[slot])
            del self._slot[self._name[slot]]
            self.parent[slot] = self.depth[slot] = 0
            self.restore[slot] = False
            self.last[slot] = _NEVER
            self._free.append(slot)
            self.children[parent] -= 1
            slot = parent

    def hide(self) -> None:
        """Nobody finds what is here any more; it stays, under names that no page has, until it is pruned."""
        slots = list(self._slot.values())
        for i, slot in enumerate(slots, self._hidden):
            self._name[slot] = i.to_bytes(8, "little")  # a page's name is longer
        self._slot = {self._name[slot]: slot for slot in slots}
        self._hidden += len(slots)

    def live(self) -> Slots:
        """All slots in use."""
        return np.flatnonzero(self.depth[: self.top])

    def check(self) -> None:
        """Assert the equations at the top of this file."""
        live = self.live()
        assert sorted(self._slot.values()) == live.tolist(), "prefix cache: names and slots disagree"
        assert all(self._slot[self._name[slot]] == slot for slot in live.tolist()), "prefix cache: a foreign name"
        assert len(live) + len(self._free) == self.top - 1, "prefix cache: slots are lost"
        parents = self.parent[live]
        assert (self.depth[live] == self.depth[parents] + 1).all(), "prefix cache: a child is not below its parent"
        assert ((parents == 0) == (self.depth[live] == 1)).all(), "prefix cache: a node lost its parent"
        counted = np.bincount(parents, minlength=self.top)
        assert np.array_equal(counted, self.children[: self.top]), "prefix cache: children are miscounted"
        holds = (self.page[live] > 0) | (self.snapshot[live] > 0) | (self.children[live] > 0)
        assert holds.all(), "prefix cache: a node without children holds nothing"

    def _find(self, names: Sequence[bytes]) -> Slots:
        """The slot of each, 0 if there is none."""
        return np.fromiter(map(self._slot.get, names, repeat(0)), np.int64, len(names))

    def _add(self, name: bytes, parent: int, depth: int, clock: int) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot, self.top = self.top, self.top + 1
            if slot == len(self.parent):
                self._widen(2 * slot)
        self._slot[name] = slot
        self._name[slot] = name
        self.parent[slot] = parent
        self.depth[slot] = depth
        self.last[slot] = clock
        self.children[parent] += 1
        return slot

    def _take(self, n: int) -> Slots:
        """Slots that are free, in the order in which they are taken one by one."""
        free = min(n, len(self._free))
        slots = self._free[len(self._free) - free :][::-1]
        del self._free[len(self._free) - free :]
        slots += range(self.top, self.top + n - free)
        self.top += n - free
        while self.top > len(self.parent):
            self._widen(2 * len(self.parent))
        return np.array(slots, np.int64)

    def _put(self, names: Sequence[bytes], slots: Slots, parent: Slots, depth: Slots, clock: int) -> None:
        """New nodes, parents that are new too before their children."""
        places = slots.tolist()
        self._slot.update(zip(names, places, strict=True))
        for name, slot in zip(names, places, strict=True):
            self._name[slot] = name
        self.parent[slots], self.depth[slots], self.last[slots] = parent, depth, clock
        np.add.at(self.children, parent, 1)

    def _widen(self, size: int) -> None:
        more = size - len(self.parent)
        for column in ("parent", "depth", "children", "page", "snapshot", "last", "restore"):
            setattr(self, column, np.pad(getattr(self, column), (0, more)))
        self._name += [_ROOT] * more
