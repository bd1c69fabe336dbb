"""A set of pages as a bitmap with summaries, for the holes of a region.

Level 0 has one bit a page, level i + 1 one bit a word of level i (set = the word is not zero), up to a
single word. Finding the k lowest or highest members walks the levels down and never looks at more than k
words of a level, so the cost follows k and not the size of the arena.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
Words = NDArray[np.uint64]

_BIT = np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64))


class PageSet:
    """Pages in `[0, capacity)`. Callers add absent pages and remove present ones, each once per call."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._levels: list[Words] = []
        size = max(1, capacity)
        while not self._levels or size > 1:
            size = -(-size // 64)
            self._levels.append(np.zeros(size, np.dtype("<u8")))

    def __len__(self) -> int:
        return self.count

    def add(self, pages: Index) -> None:
        """Put pages in."""
        self.count += len(pages)
        index = pages
        for level in self._levels:
            if not len(index):
                return
            word = index >> 6
            fresh = level[word] == 0
            np.bitwise_or.at(level, word, _BIT[index & 63])
            index = _thin(word[fresh])

    def remove(self, pages: Index) -> None:
        """Take pages out."""
        self.count -= len(pages)
        index = pages
        for level in self._levels:
            if not len(index):
                return
            word = index >> 6
            np.bitwise_and.at(level, word, ~_BIT[index & 63])
            index = _thin(word[level[word] == 0])

    def lowest(self, k: int) -> Index:
        """The k lowest members, ascending."""
        return self._walk(min(k, self.count), high=False)

    def highest(self, k: int) -> Index:
        """The k highest members, descending."""
        return self._walk(min(k, self.count), high=True)[::-1]

    def within(self, lo: int, hi: int) -> Index:
        """All members in `[lo, hi)`, ascending. Cost: the words of the range."""
        if hi <= lo:
            return np.zeros(0, np.int64)
        first = lo >> 6
        bits = np.unpackbits(self._levels[0][first : (hi + 63) >> 6].view(np.uint8), bitorder="little")
        members = np.flatnonzero(bits) + (first << 6)
        return members[(members >= lo) & (members < hi)]

    def contains(self, pages: Index) -> NDArray[np.bool_]:
        """Which of the pages are members."""
        members: NDArray[np.bool_] = (self._levels[0][pages >> 6] & _BIT[pages & 63]) != 0
        return members

    def check(self) -> None:
        """Assert that the summaries and the count follow from level 0."""
        assert int(np.bitwise_count(self._levels[0]).sum()) == self.count, "page set: count differs from its bits"
        for low, high in zip(self._levels, self._levels[1:], strict=False):
            bits = np.unpackbits(high.view(np.uint8), bitorder="little")[: len(low)]
            assert np.array_equal(bits != 0, low != 0), "page set: a summary differs from the level below"

    def _walk(self, k: int, *, high: bool) -> Index:
        index = np.zeros(1 if k else 0, np.int64)
        for level in reversed(self._levels):
            if not len(index):
                break
            bits = np.unpackbits(level[index].view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits)
            found = found[-k:] if high else found[:k]  # a word that is not zero holds at least one member
            index = (index[found >> 6] << 6) + (found & 63)
        return index


def _thin(word: Index) -> Index:
    """Drop neighbours that repeat: enough to keep sorted input short; a repeat that stays does no harm."""
    if len(word) < 2:
        return word
    return word[np.concatenate(([True], word[1:] != word[:-1]))]
