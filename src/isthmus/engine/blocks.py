"""Block tables: which virtual page id names each page-size run of a running sequence's tokens.

table[row, c] = id of tokens [c * page_size, (c + 1) * page_size), 0 where no group has a page for them
a row belongs to one running sequence; [0, columns[row]) of it are its own, the rest is left over from others
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.step import BlockWrites

Int64 = NDArray[np.int64]


class BlockTables:
    """The planner's copy of the block tables, and the writes that bring an executor's copy to the same state."""

    def __init__(self, num_rows: int) -> None:
        self._table = np.zeros((num_rows, 64), np.int32)  # as wide as the longest sequence so far
        self.columns = np.zeros(num_rows, np.int64)  # how many columns of a row are in use
        self._free = list(range(num_rows))[::-1]  # rows nobody has, lowest on top
        self._writes: list[tuple[Int64, Int64, NDArray[np.int32]]] = []  # since the last `take_writes`

    def take_row(self) -> int:
        """A row for a sequence that starts to run. IndexError when all are taken."""
        row = self._free.pop()
        self.columns[row] = 0
        return row

    def give_row(self, row: int) -> NDArray[np.int32]:
        """The row's sequence runs no more. Returns the ids it held."""
        ids = self._table[row, : self.columns[row]]
        self.columns[row] = 0
        self._free.append(row)
        return ids[ids > 0]

    def append(self, rows: Int64, columns: Int64, ids: NDArray[np.int32]) -> None:
        """Set entries at the ends of rows; ascending columns per row."""
        if not len(rows):
            return
        self._widen(int(np.maximum.reduce(columns)) + 1)
        self._set(rows, columns, ids)
        self.columns[rows] = columns + 1  # of a row that stands here twice, the last

    def replace(self, rows: Int64, columns: Int64, ids: NDArray[np.int32]) -> None:
        """Other ids now name the same tokens."""
        if len(rows):
            self._set(rows, columns, ids)

    def clear(self, rows: Int64, columns: Int64) -> None:
        """No group has a page for these columns any more."""
        self._set(rows, columns, np.zeros(len(rows), np.int32))

    def ids(self, rows: Int64, columns: Int64) -> NDArray[np.int32]:
        """The entries at these places."""
        found: NDArray[np.int32] = self._table[rows, columns]
        return found

    def take_writes(self) -> BlockWrites:
        """Everything set since the last call, in order."""
        writes, self._writes = self._writes, []
        if not writes:
            none = np.zeros(0, np.int32)
            return BlockWrites(none, none, none)
        if len(writes) == 1:
            row, column, virtual = (part.astype(np.int32) for part in writes[0])
        else:
            row, column, virtual = (np.concatenate(part, dtype=np.int32) for part in zip(*writes, strict=True))
        return BlockWrites(row, column, virtual)

    def _set(self, rows: Int64, columns: Int64, ids: NDArray[np.int32]) -> None:
        self._table[rows, columns] = ids
        self._writes.append((rows, columns, ids))

    def _widen(self, width: int) -> None:
        have = self._table.shape[1]
        if width > have:
            more = np.zeros((len(self._table), max(width, 2 * have) - have), np.int32)
            self._table = np.concatenate((self._table, more), axis=1)


def ragged(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """All places of the intervals [start[s], end[s]): `(which interval, place)`, interval by interval."""
    counts = np.maximum(end - start, 0)
    if len(counts) and np.maximum.reduce(counts) == 1:  # what decodes gain and lose
        which = counts.nonzero()[0]
        return which, start[which]
    which = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - first[which] + start[which]
