"""Sliding-window attention: a query at position p sees the keys k with p - window < k <= p."""

from __future__ import annotations

import numpy as np

from isthmus.cache.kind import Columns, TokenKind
from isthmus.memory import Group


class Window(TokenKind):
    """Only what a later query can see has a page.

    A prefill chunk attends to its own tokens straight from the activations, so of a chunk [past, past + new)
    only the tokens >= past + new - window + 1 are ever read from pages, and a chunk longer than the window
    costs no more than the window. The page of the chunk's last token is always bound.

    With `keep_boundary` it also keeps what a query at the last page boundary before the newest token can see, at
    most one page more. A prefix cache can then restore that boundary: the last one which a second request with the
    same tokens may start from, since its last token is always computed.
    """

    def __init__(self, page_size: int, window: int, *, keep_boundary: bool = False) -> None:
        super().__init__(page_size)
        assert window >= 1, "a window sees at least the query's own token"
        self.window = window
        # Tokens of a sequence whose first is the next to be dead; of a boundary, in whole pages and the newest token.
        self._seen = -(-(window - 1) // page_size) * page_size + 1 if keep_boundary else window - 1

    @classmethod
    def of(cls, group: Group, *, keep_boundary: bool = False) -> Window:
        assert group.window is not None, f"group {group.name} is a window group without a window"
        return cls(group.spec.page_size, group.window, keep_boundary=keep_boundary)

    def dead(self, length: Columns) -> Columns:
        return np.maximum(length - self._seen, 0) // self.page_size

    def extend(self, past: Columns, new: Columns) -> tuple[Columns, Columns]:
        have, high = self.columns(past), self.columns(past + new)
        return np.maximum(have, np.minimum(self.dead(past + new), high - 1)), high
