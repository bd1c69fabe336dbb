"""Times of GPU kernels without their launches: a CUDA graph of several, replayed between two events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_LEAST = 16  # launches in a graph
_LEAST_US = 2000.0  # between the two events


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch."""

    samples: tuple[float, ...]

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.samples)


def gpu_time(launches: Sequence[Callable[[], None]], samples: int = 7) -> Timing:
    """The mean time of these launches, measured several times.

    None of them may wait for the device; what they allocate is the graph's own. They should read different memory, more
    than the L2 holds in all.
    """
    for launch in launches:
        launch()  # compiles
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    repeats = -(-_LEAST // len(launches))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for launch in (*launches,) * repeats:
            launch()
        graph.capture_end()
    torch.cuda.synchronize()
    _replay(graph, 1)
    rounds = max(1, math.ceil(_LEAST_US / max(1.0, _replay(graph, 1))))
    count = rounds * repeats * len(launches)
    return Timing(tuple(_replay(graph, rounds) / count for _ in range(samples)))


def _replay(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Microseconds of so many replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
