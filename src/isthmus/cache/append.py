"""Full attention and MLA: every token stays visible."""

from __future__ import annotations

import numpy as np

from isthmus.cache.kind import Columns, TokenKind
from isthmus.memory import Group


class Append(TokenKind):
    """Every column has a page until the sequence ends."""

    @classmethod
    def of(cls, group: Group, *, keep_boundary: bool = False) -> Append:
        return cls(group.spec.page_size)

    def dead(self, length: Columns) -> Columns:
        return np.zeros_like(length)

    def extend(self, past: Columns, new: Columns) -> tuple[Columns, Columns]:
        return self.columns(past), self.columns(past + new)
