"""What comes when: requests by their lengths, before anybody made tokens of them.

one trace      read (traces.py) -> scaled -> limited
several        merged, or taking turns (`alternate`): one of them plays, the others stand still
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    at: float  # seconds
    input: int  # prompt tokens, at least 1
    output: int  # tokens it generates, at least 1
    blocks: tuple[int, ...] = ()  # who shares a leading run of these shares its tokens; () shares with nobody
    block_size: int = 0  # tokens of a block
    trace: int = 0  # blocks of different traces are different


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests `rate` times as fast, the first of them at 0."""
    start = arrivals[0].at if arrivals else 0.0
    return [replace(arrival, at=(arrival.at - start) / rate) for arrival in arrivals]


def before(arrivals: Sequence[Arrival], end: float) -> list[Arrival]:
    """Those that come before a moment."""
    return [arrival for arrival in arrivals if arrival.at < end]


def merged(traces: Sequence[Sequence[Arrival]]) -> list[Arrival]:
    """All at once; where two come together, in the order of the traces."""
    return list(heapq.merge(*traces, key=lambda arrival: arrival.at))


def alternate(traces: Sequence[Sequence[Arrival]], period: float) -> list[Arrival]:
    """Traces take turns of `period` seconds. Whose turn it is not stands still and goes on where it was.

    A trace that has ended is passed over. The first turn is the first trace's.
    """
    found: list[Arrival] = []
    next_of, turns, turn = [0] * len(traces), [0] * len(traces), 0
    while any(at < len(trace) for at, trace in zip(next_of, traces, strict=True)):
        for i, trace in enumerate(traces):
            if next_of[i] == len(trace):
                continue
            end, shift = (turns[i] + 1) * period, (turn - turns[i]) * period
            while next_of[i] < len(trace) and trace[next_of[i]].at < end:
                found.append(replace(trace[next_of[i]], at=trace[next_of[i]].at + shift))
                next_of[i] += 1
            turns[i] += 1
            turn += 1
    return found


def phase_of(at: float, period: float, count: int) -> int:
    """Whose turn it is among `count` traces, as long as none has ended."""
    return int(at // period) % count


def synthetic(shapes: Sequence[tuple[int, int, int]], rate: float | None, seed: int) -> list[Arrival]:
    """Requests of several sorts, shuffled.

    Args:
        shapes: `(count, prompt, output)` of each sort.
        rate: requests a second on average, at random moments (Poisson); None: all at 0.
        seed: of the order and the moments.
    """
    rng = np.random.default_rng(seed)
    sorts = [(prompt, output) for count, prompt, output in shapes for _ in range(count)]
    order = rng.permutation(len(sorts)).tolist()
    at = np.cumsum(rng.exponential(1 / rate, len(sorts))).tolist() if rate else [0.0] * len(sorts)
    return [Arrival(moment, *sorts[i]) for moment, i in zip(at, order, strict=True)]


class Prompts:
    """Token ids with nothing in them but who shares what with whom.

    A block's first token is its number, all others are `_FILL`. Names of pages are chains (cache/names.py), so two
    prompts have as many pages in common as the blocks say, whatever the page size up to that of a block. Small
    numbers cost a list no memory beyond itself.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._count = 0

    def tokens(self, arrival: Arrival) -> list[int]:
        """The prompt of a request."""
        tokens = [_FILL] * arrival.input
        if arrival.blocks:
            tokens[:: arrival.block_size] = self._blocks(arrival)
        else:
            tokens[0] = self.fresh()
        return tokens

    def fresh(self) -> int:
        """A token that stands nowhere else."""
        self._count += 1
        return _FILL + self._count

    def _blocks(self, arrival: Arrival) -> Iterator[int]:
        for block in arrival.blocks:
            key = (arrival.trace, block)
            if key not in self._numbers:
                self._numbers[key] = self.fresh()
            yield self._numbers[key]


_FILL = 1
