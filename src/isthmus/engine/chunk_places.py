"""The places of what a graph of a step with prefill chunks reads of the sequences' states.

How many sequences there are, and how they share the tokens out, differs from step to step; a graph has room for the
most it takes. Tokens that are left over are padding's: a sequence with the null page, that begins with this step. There
is one at least, so that what is computed for nobody has somewhere to go: for places that are left over, a sequence with
the null page again, which has padding's last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.device_plan import StatePlan

PREFIX = "states."

_SHORT, _FEW = 64, 16
"""Chunks of so many tokens or more have room in every graph, and so have so few chunks of any. A place that nobody
takes costs programs with a token of padding and no state, a step that no graph holds all its launches."""


@dataclass(frozen=True)
class ChunkPlaces:
    """Of one graph."""

    tokens: int  # T, padding's among them
    sequences: int  # S: a step's, padding's, and nobody's
    members: int  # M: those with several tokens, and padding's, of which there is one at least

    @classmethod
    def of(cls, tokens: int, max_num_seqs: int) -> ChunkPlaces:
        """For a graph of so many tokens."""
        most = min(tokens - 1, max_num_seqs)
        return cls(tokens, most + 2, min(most + 1, tokens // _SHORT + _FEW))

    def hold(self, plan: StatePlan) -> bool:
        """Can the graph run this step?"""
        live = int(plan.query_start[-1]) < self.tokens and len(plan.entry) < self.sequences - 1
        return live and len(plan.chunks) < self.members

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        words = {
            "starts": self.sequences,
            "ends": self.sequences,
            "decodes": self.sequences - 2,
            "chunks": self.members,
            "owner": self.tokens,
        }
        named = {"entry": 4 * self.sequences, "fresh": self.sequences} | {name: 8 * n for name, n in words.items()}
        return {PREFIX + name: size for name, size in named.items()}

    def arrays(self, plan: StatePlan) -> dict[str, NDArray[Any]]:
        """What goes there for a step, which must `hold`."""
        padding, nobody = len(plan.entry), self.sequences - 1
        found = {
            "entry": _filled(plan.entry, self.sequences, plan.null),
            "fresh": _filled(plan.fresh, self.sequences, True),
            "starts": _filled(plan.query_start, self.sequences, self.tokens - 1),
            "ends": _filled(plan.query_start[1:] - 1, self.sequences, self.tokens - 1),
            "decodes": _filled(plan.decodes, self.sequences - 2, nobody),
            "chunks": _filled(np.append(plan.chunks, padding), self.members, nobody),
            "owner": _filled(plan.owner, self.tokens, padding),
        }
        return {PREFIX + name: array for name, array in found.items()}


def _filled(values: NDArray[Any], size: int, value: int | bool) -> NDArray[Any]:
    return np.concatenate((values[:size], np.full(size - len(values[:size]), value, values.dtype)))
