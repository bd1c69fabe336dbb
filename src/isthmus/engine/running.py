"""The sequences that run, oldest first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import overload

import numpy as np

from isthmus.engine.rows import Int64, Rows
from isthmus.engine.sequence import Sequence


class Running(Items[Sequence]):
    """Sorted by `Sequence.order`; where each of them stands is in `at`, by row."""

    def __init__(self, num_rows: int) -> None:
        self.at = Rows(num_rows)
        self._sequences: list[Sequence] = []
        self._rows: Int64 | None = None  # of the sequences, in order; made when they are asked for

    @property
    def rows(self) -> Int64:
        """The row of each, in order. Nobody changes it."""
        if self._rows is None:
            self._rows = np.array([sequence.row for sequence in self._sequences], np.int64)
        return self._rows

    @property
    def past(self) -> Int64:
        """Tokens cached of each, in order."""
        past: Int64 = self.at.past[self.rows]
        return past

    def add(self, sequence: Sequence, row: int, past: int, cuts: tuple[int, ...]) -> None:
        """It runs in that row from now on, with `past` tokens cached."""
        sequence.enter(self.at, row, past, cuts)
        self._sequences.insert(bisect_left(self._sequences, sequence.order, key=_age), sequence)
        self._rows = None

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """They run no more, and have no row."""
        for sequence in sequences:
            sequence.leave()
        self._sequences = [sequence for sequence in self._sequences if sequence.row >= 0]
        self._rows = None

    def some(self, places: Items[int]) -> list[Sequence]:
        """Those at these places in the order."""
        return [self._sequences[i] for i in places]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...
    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._sequences[index]


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
