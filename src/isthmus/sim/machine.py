"""How long a step takes: a sum of what it cannot avoid.

    seconds = layers * layer_s + sequences * sequence_s
            + max(weights / bytes_per_s, products / flops_per_s)         reading weights and multiplying overlap
            + caches / bytes_per_s + pairs / flops_per_s
            + exchanges * exchange_s + exchanged / link_bytes_per_s      with tensor parallelism

The step is one of an engine in its stride: what the host does beside the device's work is in `layer_s` and `sequence_s`
as far as it shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError
from isthmus.sim.shape import Work

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """One device (with tensor parallelism: several alike)."""

    name: str
    source: str  # where the numbers are from
    layer_s: float  # of every decoder layer of a step, whatever is in it: launches, small kernels
    sequence_s: float  # of every sequence in a step
    bytes_per_s: float  # weights and caches, read or written
    flops_per_s: float
    exchange_s: float = 0.0  # of one all-reduce, whatever its size
    link_bytes_per_s: float = float("inf")  # of an all-reduce, per device

    def seconds(self, work: Work) -> Float64:
        """Of each step, in the shape of the work's arrays."""
        weights = max(work.weights / self.bytes_per_s, work.products / self.flops_per_s)
        exchange = work.exchanges * self.exchange_s + work.exchanged / self.link_bytes_per_s
        fixed = work.layers * self.layer_s + work.sequences * self.sequence_s + weights + exchange
        seconds: Float64 = fixed + work.caches / self.bytes_per_s + work.pairs / self.flops_per_s
        return seconds


MACHINES: Mapping[str, Machine] = {
    "h200": Machine(
        "h200",
        "docs/results/2026-11-29-h200-step-1b.json and -throughput-a-1b, -a-4b, -b-4b; exchanges are assumed",
        layer_s=5.365e-5,
        sequence_s=1.004e-6,
        bytes_per_s=4.214e12,
        flops_per_s=5.577e14,
        exchange_s=1e-5,
        link_bytes_per_s=3e11,
    ),
    "cpu": Machine(
        "cpu",
        "docs/results/2026-11-29-single.json and -batch.json (demo, 2 cores)",
        layer_s=9.123e-4,
        sequence_s=3.536e-4,
        bytes_per_s=1.176e11,
        flops_per_s=5.859e11,
    ),
}
"""Fitted with `isthmus simulate --calibrate`, each to files of one machine; docs/simulate.md has what is left over."""


def machine(name: str) -> Machine:
    """A machine by name. ConfigError names those there are."""
    if name not in MACHINES:
        raise ConfigError(f"--machine {name!r} is not known: one of {', '.join(MACHINES)}")
    return MACHINES[name]
