"""What a cache kind must answer. Pure arithmetic over lengths: no pages, no ids, no pool, no torch.

Words: *column* c of a sequence is its tokens [c * page_size, (c + 1) * page_size), one virtual page id in its
block table; a state has the single column 0. All methods work on arrays, one entry per sequence.

    step from `past` by `new` tokens:   [0, dead(past)) may be unbound before it, the rest it may read
                                        extend(past, new) = the columns that must be bound for it
    after it:                           dead(past + new) never falls below the extend's start
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Columns = NDArray[np.int64]
Space = Literal["tokens", "states"]


class CacheKind(ABC):
    """Policy over the pages of one layer group."""

    space: ClassVar[Space]  # whose virtual ids the group's pages bear
    page_size: int  # tokens per column

    @abstractmethod
    def columns(self, length: Columns) -> Columns:
        """How many columns a sequence of `length` tokens has."""

    @abstractmethod
    def dead(self, length: Columns) -> Columns:
        """Columns [0, dead) hold nothing that a query at position `length` or later can see."""

    @abstractmethod
    def extend(self, past: Columns, new: Columns) -> tuple[Columns, Columns]:
        """Columns [low, high) that must gain a page before a step that appends `new` >= 1 tokens to `past`.

        They are columns that a sequence of `past` tokens does not have: what is live there is bound already.
        """

    def held(self, past: Columns, new: Columns) -> Columns:
        """Pages bound while that step runs, when everything dead was unbound before it."""
        have = self.columns(past)
        low, high = self.extend(past, new)
        return have - np.minimum(self.dead(past), have) + high - low


class TokenKind(CacheKind):
    """A kind with a page per `page_size` tokens."""

    space = "tokens"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def columns(self, length: Columns) -> Columns:
        return (length + (self.page_size - 1)) // self.page_size
