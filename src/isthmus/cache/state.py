"""Recurrent layers and short convolutions: one page holds a sequence's whole state, whatever its length."""

from __future__ import annotations

import numpy as np

from isthmus.cache.kind import CacheKind, Columns
from isthmus.memory import Group


class State(CacheKind):
    """Column 0 is bound with the first token and stays."""

    space = "states"

    def __init__(self) -> None:
        self.page_size = 1

    @classmethod
    def of(cls, group: Group, *, keep_boundary: bool = False) -> State:
        return cls()

    def columns(self, length: Columns) -> Columns:
        return np.minimum(length, 1)

    def dead(self, length: Columns) -> Columns:
        return np.zeros_like(length)

    def extend(self, past: Columns, new: Columns) -> tuple[Columns, Columns]:
        return self.columns(past), self.columns(past + new)
