"""Another rule for where states are saved, to compare with the engine's own.

branch     the engine's: at the end of prompts and requests and where a later prompt branched off
interval   at every multiple of N tokens, of prompts and outputs, and nowhere else
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from isthmus.cache.prefix import Match, PrefixCache
from isthmus.engine.placement import Placement
from isthmus.engine.rows import Bool, Int64, Rows
from isthmus.engine.sequence import Sequence
from isthmus.engine.sharing import Sharing


class IntervalSharing(Sharing):
    """Sharing with snapshots at fixed intervals. `interval` is a multiple of the page size."""

    def __init__(self, cache: PrefixCache, placement: Placement, interval: int) -> None:
        super().__init__(cache, placement)
        self._interval = interval

    def share(self, sequences: Iterable[Sequence]) -> None:
        """Also saves the states of those that stand at a multiple of the interval."""
        members = list(sequences)
        super().share(members)
        for sequence in members:
            self.keep(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Nobody can come back to anywhere else."""
        if sequence.past % self._interval == 0:
            super().keep(sequence)

    def _cuts(self, past: int, length: int, match: Match) -> tuple[int, ...]:
        return ()


class IntervalRows(Rows):
    """Prefill chunks end at every multiple of the interval, because that is where a state can be saved."""

    def __init__(self, num_rows: int, interval: int) -> None:
        super().__init__(num_rows)
        self._interval = interval

    def todo(self, rows: Int64, pending: Bool) -> Int64:
        """Tokens to the next place where a chunk must end."""
        return np.minimum(super().todo(rows, pending), self._interval - self.past[rows] % self._interval)
