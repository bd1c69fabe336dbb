"""Virtual page ids: who mints them, which are live, and the page tables they index.

An id space makes its own tables (`IdSpace.table`), so a page table is exactly as long as the ids that
will index it; there is no other way to make one. Equations, asserted by `check`:

    free ids + live ids = capacity            ids are 1 .. capacity; 0 is the null page of every group
    len(table) = capacity + 1, table[0] = 0   for every table of the space
    table[v] = 0 for every id that is not live

Two array types keep the two kinds of integers apart at run time: a door that expects one raises
TypeError when it is handed the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.integer]


class VirtualPages(np.ndarray):
    """Stable names of pages, int32 `[n]`: what block tables, the prefix cache and the scheduler hold."""


class PhysicalPages(np.ndarray):
    """Places in the arena, int32 `[n]`: page p of a group lies at byte `p * page_bytes`. Valid until the next move."""


VirtualLike: TypeAlias = VirtualPages | Int | Sequence[int]


def as_virtual(ids: VirtualLike) -> NDArray[np.int64]:
    """A plain index array of virtual ids. TypeError for physical pages or anything that is not integers."""
    if isinstance(ids, PhysicalPages):
        raise TypeError("physical pages given where virtual page ids are due: hold ids, translate at the last moment")
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"virtual page ids must be one row of integers, not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64, copy=False)


def as_physical(pages: PhysicalPages) -> NDArray[np.int64]:
    """A plain index array of physical pages. TypeError unless they came from a translation."""
    if not isinstance(pages, PhysicalPages):
        raise TypeError("physical pages are due here: translate virtual page ids first")
    return np.asarray(pages).astype(np.int64, copy=False)


def _highest(index: NDArray[np.int64]) -> int:
    """The largest of them where those below 0 count as larger than any other: both bounds at a glance."""
    return int(np.maximum.reduce(index.view(np.uint64)))


class PageTable:
    """Virtual to physical for one group. Made by `IdSpace.table` and nowhere else."""

    def __init__(self, space: IdSpace, group: str) -> None:
        self.group = group
        self.entries: NDArray[np.int32] = np.zeros(space.capacity + 1, np.int32)  # 0 = not bound; only `Bindings` write

    def __len__(self) -> int:
        return len(self.entries)

    def translate(self, ids: VirtualLike) -> PhysicalPages:
        """Physical page of each id, 0 (the null page) where it is not bound. IndexError names group and id."""
        return self.pages(ids).view(PhysicalPages)

    def pages(self, ids: VirtualLike) -> NDArray[np.int32]:
        """The same as plain numbers, for the pool's own books."""
        index = as_virtual(ids)
        self._guard(index)
        return self.entries[index]

    def bind(self, ids: NDArray[np.int64], pages: Int | int) -> None:
        """Set entries; bounds-checked like every access, because an unchecked write is how corruption starts."""
        self._guard(ids)
        self.entries[ids] = pages

    def _guard(self, index: NDArray[np.int64]) -> None:
        if index.size and _highest(index) >= len(self.entries):
            bad = int(index[(index < 0) | (index >= len(self.entries))][0])
            last = len(self.entries) - 1
            raise IndexError(f"group {self.group!r}: virtual page id {bad} is outside its page table (ids 0..{last})")


class IdSpace:
    """Mints virtual ids first freed, last reused, so that churn visits the whole space early."""

    def __init__(self, name: str, capacity: int) -> None:
        if not 0 <= capacity < 2**31:
            raise ValueError(f"id space {name!r}: capacity {capacity} does not fit int32; use larger pages")
        self.name = name
        self.capacity = capacity
        self.minted = 0  # ids handed out since the start; minted / capacity = times round the ring
        self.tables: dict[str, PageTable] = {}
        self._ring = np.arange(
            1, capacity + 1, dtype=np.int32
        )  # free ids lie at _head .. _head + free, modulo capacity
        self._head = 0
        self._free = capacity
        self._live = np.zeros(capacity + 1, np.bool_)
        self._mark = np.empty(capacity + 1, np.int32)  # scratch of `require_distinct`; holds no state between calls

    @property
    def free(self) -> int:
        """How many ids are not live."""
        return self._free

    @property
    def live(self) -> int:
        """How many ids are live."""
        return self.capacity - self._free

    def table(self, group: str) -> PageTable:
        """The page table of a group whose pages these ids name; made on the first call."""
        if group not in self.tables:
            self.tables[group] = PageTable(self, group)
        return self.tables[group]

    def is_live(self, ids: VirtualLike) -> NDArray[np.bool_]:
        """Which of the ids are live. IndexError for ids outside the space."""
        index = as_virtual(ids)
        self._guard(index)
        return self._live[index]

    def live_ids(self) -> VirtualPages:
        """All live ids, ascending."""
        return np.flatnonzero(self._live).astype(np.int32).view(VirtualPages)

    def peek(self, n: int) -> VirtualPages:
        """The ids the next `mint(n)` will hand out. Changes nothing."""
        assert 0 <= n <= self._free, f"id space {self.name!r}: {n} ids wanted, {self._free} free"
        end = self._head + n
        if end <= self.capacity:
            return self._ring[self._head : end].copy().view(VirtualPages)
        return np.concatenate((self._ring[self._head :], self._ring[: end - self.capacity])).view(VirtualPages)

    def mint(self, n: int) -> VirtualPages:
        """Hand out n ids."""
        ids = self.peek(n)
        if n:
            self._live[np.asarray(ids)] = True
            self._head = (self._head + n) % self.capacity
            self._free -= n
            self.minted += n
        return ids

    def require_live(self, ids: VirtualLike) -> NDArray[np.int64]:
        """The ids as an index, after checking that each is in range, live, and given once. Changes nothing."""
        index = as_virtual(ids)
        self._guard(index)
        if np.count_nonzero(self._live[index]) < len(index):
            bad = int(index[~self._live[index]][0])
            raise ValueError(
                f"id space {self.name!r}: virtual page id {bad} is not live (released twice, or never minted)"
            )
        self.require_distinct(index)
        return index

    def retire(self, index: NDArray[np.int64]) -> None:
        """Make ids free again; `index` comes from `require_live` with nothing in between."""
        n = len(index)
        self._live[index] = False
        tail = (self._head + self._free + np.arange(n)) % max(1, self.capacity)
        self._ring[tail] = index
        self._free += n

    def restore(self, free: NDArray[np.int64], minted: int) -> None:
        """Take over a state that `free_ids` and `minted` told of another such space. No table is changed."""
        self._guard(free)
        self.require_distinct(free)
        self._head, self._free, self.minted = 0, len(free), minted
        self._ring[: len(free)] = free
        self._live[:] = True
        self._live[0] = False
        self._live[free] = False

    def check(self) -> None:
        """Assert the equations at the top of this file."""
        free = self.free_ids()
        in_ring = np.zeros(self.capacity + 1, np.bool_)
        in_ring[free] = True
        assert self._free + int(self._live.sum()) == self.capacity, f"id space {self.name!r}: free + live != capacity"
        assert np.count_nonzero(in_ring) == len(free), f"id space {self.name!r}: a free id stands twice in the ring"
        assert not (self._live & in_ring).any(), f"id space {self.name!r}: a live id stands in the ring of free ones"
        assert not self._live[0], f"id space {self.name!r}: id 0 is live"
        for table in self.tables.values():
            assert len(table) == self.capacity + 1, f"table of {table.group!r} is not as long as its id space"
            assert not table.entries[~self._live].any(), f"table of {table.group!r} binds an id that is not live"

    def free_ids(self) -> VirtualPages:
        """The free ids in the order they will be handed out."""
        return self.peek(self._free)

    def _guard(self, index: NDArray[np.int64]) -> None:
        if index.size and _highest(index - 1) >= self.capacity:
            bad = int(index[(index < 1) | (index > self.capacity)][0])
            raise IndexError(f"id space {self.name!r}: {bad} is not a virtual page id (ids 1..{self.capacity})")

    def require_distinct(self, index: NDArray[np.int64]) -> None:
        """ValueError if an id is given twice."""
        order = np.arange(len(index), dtype=np.int32)
        self._mark[index] = order
        same = self._mark[index] == order
        if np.count_nonzero(same) < len(index):
            raise ValueError(
                f"id space {self.name!r}: virtual page id {int(index[~same][0])} is given twice in one call"
            )
