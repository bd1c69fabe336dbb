"""The places of what a graph of a step with prefill chunks reads of the sequences' states.

How many sequences there are, and how they share the tokens out, differs from step to step; a graph has room for the
most it takes. Whatever is left over is padding's: a sequence with the null page, that begins with this step. At least
one token is padding's, so that what is computed for nobody has somewhere to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.device_plan import Int64, StatePlan
from isthmus.kernels.fla_chunks import CHUNK, cut

PREFIX = "states."

_SHORT, _FEW = 64, 16
"""Chunks of so many tokens or more have room in every graph, and so have so few chunks of any. A place that nobody
takes costs about the bytes of a state, a step that no graph holds all its launches."""


@dataclass(frozen=True)
class ChunkPlaces:
    """Of one graph."""

    tokens: int  # T, padding's among them
    sequences: int  # S, the last is padding's
    members: int  # M: those with several tokens, and padding's, of which there is one at least

    @classmethod
    def of(cls, tokens: int, max_num_seqs: int) -> ChunkPlaces:
        """For a graph of so many tokens."""
        sequences = min(tokens - 1, max_num_seqs) + 1
        return cls(tokens, sequences, min(sequences, tokens // _SHORT + _FEW))

    def hold(self, plan: StatePlan) -> bool:
        """Can the graph run this step?"""
        live = int(plan.query_start[-1]) < self.tokens and len(plan.entry) < self.sequences
        return live and len(plan.chunks) < self.members

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        words = {
            "starts": self.sequences,
            "ends": self.sequences,
            "decodes": self.sequences - 1,
            "chunks": self.members,
            "owner": self.tokens,
            "packed.chunks": 2 * self._packed_chunks,
            "packed.bounds": self.members + 1,
            "packed.tokens": self.tokens,
            "packed.sequences": self.members,
        }
        named = {"entry": 4 * self.sequences, "fresh": self.sequences} | {name: 8 * n for name, n in words.items()}
        return {PREFIX + name: size for name, size in named.items()}

    def arrays(self, plan: StatePlan) -> dict[str, NDArray[Any]]:
        """What goes there for a step, which must `hold`."""
        live, nobody = int(plan.query_start[-1]), self.sequences - 1
        padding = np.arange(live, self.tokens)
        counts, chunks = np.diff(plan.query_start), plan.chunks
        owner = np.repeat(np.arange(len(counts) + 1), np.append(counts, len(padding)))
        found = {
            "entry": _filled(plan.entry, self.sequences, plan.null),
            "fresh": _filled(plan.fresh, self.sequences, True),
            "starts": _filled(plan.query_start, self.sequences, self.tokens - 1),
            "ends": _filled(plan.query_start[1:] - 1, self.sequences, self.tokens - 1),
            "decodes": _filled(plan.decodes, self.sequences - 1, nobody),
            "chunks": _filled(np.append(chunks, len(counts)), self.members, nobody),
            "owner": owner,
            **self._packed(plan.query_start, chunks, padding),
        }
        return {PREFIX + name: array for name, array in found.items()}

    @property
    def _packed_chunks(self) -> int:
        """Most there can be of all members together."""
        return (self.tokens + (CHUNK - 1) * self.members) // CHUNK

    def _packed(self, query_start: Int64, sequences: Int64, padding: Int64) -> dict[str, Int64]:
        """As a library takes them (`Packed`): sequences with several tokens end to end, and behind them padding.

        A library walks through a member's chunks one after the other, so padding's tokens are shared out among all
        members that are left.
        """
        counts = query_start[sequences + 1] - query_start[sequences]
        ends, total, live = np.cumsum(counts), int(counts.sum()), len(sequences)
        left = self.members - live
        share = CHUNK * -(-(self.tokens - total) // (CHUNK * left))
        shares = np.minimum(total + share * np.arange(1, left + 1), self.tokens)
        bounds = np.concatenate(([0], ends, shares))
        chunks = cut(np.diff(bounds))
        none = (live, -(-(bounds[live + 1] - total) // CHUNK))  # a chunk behind the end of its member
        more = np.tile(np.array(none, np.int64), (self._packed_chunks - len(chunks), 1))
        tokens = np.arange(total) + np.repeat(query_start[sequences] - (ends - counts), counts)
        return {
            "packed.chunks": np.concatenate((chunks, more)),
            "packed.bounds": bounds,
            "packed.tokens": _filled(np.append(tokens, padding), self.tokens, self.tokens - 1),
            "packed.sequences": _filled(sequences, self.members, self.sequences - 1),
        }


def _filled(values: NDArray[Any], size: int, value: int | bool) -> NDArray[Any]:
    return np.concatenate((values[:size], np.full(size - len(values[:size]), value, values.dtype)))
