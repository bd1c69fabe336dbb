"""CUDA graphs of the forward over decodes alone, one per number of lanes.

A step with n sequences replays the smallest graph with at least n lanes. Every input a graph reads is written anew
before every replay, padding lanes included: they read nothing and write nowhere (`NOBODY`), so what an earlier,
larger step left behind cannot be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.model.device_attention import GroupStep


def lane_counts(most: int) -> tuple[int, ...]:
    """Sizes to capture: 2, 4, 8, 16, 32, then every 32 up to at least `most`. (One row would be a shape of its own.)"""
    powers = [n for n in (2, 4, 8, 16) if n < most]
    return (*powers, *range(32, most + 31, 32)) if most > 16 else (*powers, max(2, most))


@dataclass(frozen=True)
class Inputs:
    """What a captured forward reads; T tokens, one per lane."""

    tokens: Tensor  # int32 [T], below 0 where the row's last sampled token is meant
    feed: Tensor  # int32 [T]: the rows
    positions: Tensor  # int32 [T]
    groups: Mapping[str, GroupStep]


@dataclass(frozen=True)
class Outputs:
    """Valid until the next replay of any graph."""

    logits: Tensor  # [T, >= vocab]
    tokens: Tensor  # int32 [T], greedy


@dataclass(frozen=True)
class Graph:
    """One captured forward."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs


class DecodeGraphs:
    """The captured forwards of one executor.

    Args:
        forward: inputs to outputs; queues work on the current stream and reads nothing back.
        inputs: makes the inputs for a number of lanes; the tensors stay where they are.
        sizes: numbers of lanes, ascending.
    """

    def __init__(
        self, forward: Callable[[Inputs], Outputs], inputs: Callable[[int], Inputs], sizes: Sequence[int]
    ) -> None:
        self._graphs: dict[int, Graph] = {}
        self.sizes = tuple(sizes)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for lanes in reversed(self.sizes):  # the largest first: the others fit into its memory
            given = inputs(lanes)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                forward(given)  # compiles and allocates what a capture may not
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = forward(given)
            self._graphs[lanes] = Graph(graph, outputs)

    def lanes(self, sequences: int) -> int:
        """Of the graph that a step of so many sequences replays."""
        return next(n for n in self.sizes if n >= sequences)

    def replay(self, lanes: int) -> Outputs:
        """Run the forward over the inputs as they are now."""
        found = self._graphs[lanes]
        found.graph.replay()
        return found.outputs
