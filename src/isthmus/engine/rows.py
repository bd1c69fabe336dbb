"""Where each running sequence stands, as arrays by row: what every step asks of all of them at once.

0 <= past[r] <= length[r]     as `Sequence` has them, which reads them here while it runs
known[r] <= length[r]         tokens that are here; token t in recent[r, t % _RECENT] while
                              max(first[r], known[r] - _RECENT) <= t < known[r]
gathered[r] <= known[r]       of these, those that its sequence has too; it gathers the rest before they are lost
owner[r]                      a number that no other stay in any row has; 0 while nobody has the row
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

FAR = 1 << 62
"""Behind every token."""

_RECENT = 256  # tokens of a row that are kept beside its sequence
_ENDS = 8  # tokens that may end a sequence, as far as they are looked for in all rows at once


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
        self.known = np.zeros(num_rows, np.int64)
        self.told = np.zeros(num_rows, np.bool_)  # somebody wants to hear of each of its tokens
        self.owner = np.zeros(num_rows, np.int64)
        self._gathered = np.zeros(num_rows, np.int64)  # tokens that its sequence has itself
        self._first = np.zeros(num_rows, np.int64)  # the first token that came while the row had its owner
        self._recent = np.zeros((num_rows, _RECENT), np.int32)
        self._ends = np.full((_ENDS, num_rows), -1, np.int32)  # tokens that may end it
        self._most_ends = 0  # that a row ever had there
        # Whatever comes behind so many tokens may end it: by length, or as more tokens may end it than those above.
        self._over_from = np.zeros(num_rows, np.int64)
        self._cuts = np.zeros((2, num_rows), np.int64)  # where its chunks end besides, ascending; 0: nowhere
        self._last_cut = self._cuts[1]
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
        *,
        told: bool,
        ends: Collection[int],
    ) -> None:
        """A sequence starts to run there; of its `length` tokens none is in flight."""
        assert not self.owner[row], f"row {row} has an owner"
        self._stays += 1
        self.owner[row] = self._stays
        self.past[row], self.length[row], self.prompt[row] = past, length, prompt
        self.most_cached[row], self.plain_from[row] = most_cached, plain_from
        self.looks_back[row], self.begun[row] = looks_back, False
        self.known[row] = self._gathered[row] = self._first[row] = length
        self.told[row] = told
        self._cuts[:, row] = (0, 0, *cuts)[-2:]
        self._ends[:, row], self._over_from[row] = -1, most_cached
        if len(ends) > _ENDS:
            self._over_from[row] = 0
        else:
            self._ends[: len(ends), row] = list(ends)
            self._most_ends = max(self._most_ends, len(ends))

    def give(self, row: int) -> None:
        """Its sequence runs no more."""
        self.owner[row] = 0

    def append(self, rows: Int64, tokens: Int32) -> tuple[Bool, Bool]:
        """A token more is here for each of these. Returns which may have ended with it, and which have no room for
        another one until their sequence has gathered them."""
        known = self.known[rows]
        self._recent[rows, known % _RECENT] = tokens
        self.known[rows] = known + 1
        over: Bool = known >= self._over_from[rows]
        for ends in self._ends[: self._most_ends]:
            over |= ends[rows] == tokens
        return over, known - self._gathered[rows] == _RECENT - 1

    def gather(self, row: int) -> list[int]:
        """The tokens that its sequence does not have yet: it has them from now on."""
        known, gathered = int(self.known[row]), int(self._gathered[row])
        if known == gathered:
            return []
        self._gathered[row] = known
        recent, start, end = self._recent[row], gathered % _RECENT, (known - 1) % _RECENT + 1
        if start < end:
            return cast("list[int]", recent[start:end].tolist())
        return cast("list[int]", recent[start:].tolist() + recent[:end].tolist())

    def here(self, rows: Int64) -> Int64:
        """Tokens of each that are here and cached."""
        here: Int64 = np.minimum(self.past[rows], self.known[rows])
        return here

    def has_recent(self, rows: Int64, start: Int64) -> Bool:
        """Which of these have all their tokens from `start[i]` on at hand, gathered or not."""
        found: Bool = start >= np.maximum(self._first[rows], self.known[rows] - _RECENT)
        return found

    def recent(self, rows: Int64, start: Int64, count: int) -> Int32:
        """[n, count] tokens of each from `start[i]` on, which it has at hand."""
        found: Int32
        if _RECENT % count or np.count_nonzero(start % count):
            found = self._recent[rows[:, None], (start[:, None] + np.arange(count)) % _RECENT]
        else:  # whole pages, which do not go round
            found = self._recent.reshape(-1, count).take((rows * _RECENT + start % _RECENT) // count, axis=0)
        return found

    def went_on(self, rows: Int64, tokens: int) -> None:
        """Each of these has so many tokens more, cached and known; their sequences have gathered them."""
        for column in (self.past, self.length, self.known, self._gathered):
            column[rows] += tokens
        self._first[rows] = self.known[rows]

    def begin(self, rows: Int64) -> Int64:
        """These are in a step. Returns those that were in none before since they have their row: places in `rows`."""
        begun = self.begun[rows]
        if np.count_nonzero(begun) == len(begun):
            return rows[:0]
        self.begun[rows] = True
        return (~begun).nonzero()[0]

    def pending(self, rows: Int64) -> Bool:
        """Is the newest token of each of these in flight?"""
        pending: Bool = self.length[rows] > self.known[rows]
        return pending

    def todo(self, rows: Int64, pending: Bool) -> Int64:
        """Tokens that each of these has to compute before the next place where a chunk must end; 0 while it has to
        wait for a token that is pending."""
        past, end = self.past[rows], self.length[rows]
        waits = (end > self.most_cached[rows]) | (self.looks_back[rows] & pending)
        last = self._last_cut[rows]
        cut = last > past
        if np.count_nonzero(cut):
            first = self._cuts[0, rows]
            end = np.where(cut, np.where(first > past, first, last), end)
        todo: Int64 = end - past
        todo[waits] = 0
        return todo
