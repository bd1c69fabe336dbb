"""Where each running sequence stands, as arrays by row: what every step asks of all of them at once.

0 <= past[r] <= length[r]     as `Sequence` has them, which reads them here while it runs
owner[r]                      a number that no other stay in any row has; 0 while nobody has the row
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

FAR = 1 << 62
"""Behind every token."""


class Rows:
    """Arrays with one entry per row of the block table."""

    def __init__(self, num_rows: int) -> None:
        self.past = np.zeros(num_rows, np.int64)
        self.length = np.zeros(num_rows, np.int64)
        self.prompt = np.zeros(num_rows, np.int64)  # tokens of the prompt
        self.most_cached = np.zeros(num_rows, np.int64)
        self.plain_from = np.zeros(num_rows, np.int64)  # tokens from which on what it samples is plain
        self.looks_back = np.zeros(num_rows, np.bool_)
        self.begun = np.zeros(num_rows, np.bool_)  # it was in a step since it has the row
        self.owner = np.zeros(num_rows, np.int64)
        self._cuts = np.zeros((2, num_rows), np.int64)  # where its chunks end besides, ascending; 0: nowhere
        self._stays = 0

    def take(
        self,
        row: int,
        past: int,
        length: int,
        prompt: int,
        most_cached: int,
        plain_from: int,
        looks_back: bool,
        cuts: tuple[int, ...],
    ) -> None:
        """A sequence starts to run there."""
        assert not self.owner[row], f"row {row} has an owner"
        self._stays += 1
        self.owner[row] = self._stays
        self.past[row], self.length[row], self.prompt[row] = past, length, prompt
        self.most_cached[row], self.plain_from[row] = most_cached, plain_from
        self.looks_back[row], self.begun[row] = looks_back, False
        self._cuts[:, row] = (0, 0, *cuts)[-2:]

    def give(self, row: int) -> None:
        """Its sequence runs no more."""
        self.owner[row] = 0

    def todo(self, rows: Int64, pending: Bool) -> Int64:
        """Tokens that each of these has to compute before the next place where a chunk must end; 0 while it has to
        wait for a token that is pending."""
        past, end = self.past[rows], self.length[rows]
        waits = (end > self.most_cached[rows]) | (self.looks_back[rows] & pending)
        last = self._cuts[1, rows]
        cut = last > past
        if np.count_nonzero(cut):
            first = self._cuts[0, rows]
            end = np.where(cut, np.where(first > past, first, last), end)
        todo: Int64 = end - past
        todo[waits] = 0
        return todo
