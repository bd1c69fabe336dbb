"""CUDA graphs of a forward, one per size.

A step with n tokens replays the smallest graph of at least n. Every input a graph reads is written anew before every
replay, padding included, so what an earlier, larger step left behind cannot be seen.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from isthmus.errors import ModelError
from isthmus.model.device_attention import GroupStep
from isthmus.model.device_states import StateInputs

T = TypeVar("T")
_FLAT = 128  # tokens: up to about so many a step takes as long as its weights are read, so padding costs little


def lane_counts(most: int, every: int = 0) -> tuple[int, ...]:
    """Sizes for decodes alone: powers of two up to 32 (1 is compiled apart, and has linear layers of its own), every 32
    up to 256, every 64 up to at least `most`; and all numbers up to `every`."""
    sizes = [n for n in (1, 2, 4, 8, 16) if n < most] + [most] * (most <= 16)
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (16 if sizes[-1] < 32 else 32 if sizes[-1] < 256 else 64))
    return tuple(sorted({*sizes, *range(1, min(every, most) + 1)}))


def token_counts(most: int) -> tuple[int, ...]:
    """Sizes for steps with prefill chunks, the last as little above `most` as the others are apart: four an octave, so
    that padding is at most a fifth. Capturing takes time: small ones are an octave apart."""
    sizes, step = [8, 16], 8
    while sizes[-1] < most:
        if sizes[-1] >= 8 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    *smaller, largest = sizes
    return (*(n for n in smaller if n >= _FLAT or n.bit_count() == 1), largest)


@dataclass(frozen=True)
class Inputs:
    """What a captured forward reads; T tokens, S sequences. All but slots and page tables in `groups` is uploaded."""

    tokens: Tensor  # int32 [T], below 0 where the row's last sampled token is meant
    feed: Tensor  # int32 [T]: the rows
    positions: Tensor  # int32 [T]
    sequence_of: Tensor  # int32 [T], below 0: padding
    rows: Tensor  # int32 [S]
    index: Tensor  # int32: what is written to the tables before anything reads them, see `scatter`
    value: Tensor
    first: Mapping[str, Tensor]  # int32 [S] of each group: columns of the block table that are read, see `translate`
    end: Tensor  # int32 [S]
    groups: Mapping[str, GroupStep]
    states: StateInputs | None  # None: the model has none


class Graphs(Generic[T]):
    """The captured forwards of one executor.

    Args:
        forward: inputs to outputs; queues work on the current stream and reads nothing back. Outputs are valid until
            the next replay of any graph of the same memory.
        inputs: makes the inputs of a size; the tensors stay where they are.
        sizes: ascending.
        memory: what graphs that never run at the same time share, from `torch.cuda.graph_pool_handle`.
    """

    def __init__(
        self,
        forward: Callable[[Inputs], T],
        inputs: Callable[[int], Inputs],
        sizes: Sequence[int],
        memory: Any,
    ) -> None:
        self.sizes = tuple(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with _quick_collections():
            for size in reversed(self.sizes):  # the largest first: the others fit into its memory
                given = inputs(size)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    forward(given)  # compiles and allocates what a capture may not
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph, pool=memory, stream=stream):
                        outputs = forward(given)
                except RuntimeError as error:  # ends the capture with an error of its own, behind the one that matters
                    line = str(error.__context__ or error).splitlines()[0]
                    raise ModelError(
                        f"the forward cannot be captured in a CUDA graph ({line}): use --enforce-eager"
                    ) from error
                graph.replay()  # over the same inputs: the first time it is brought to the device, which takes long
                self._graphs[size] = graph, outputs

    def size(self, tokens: int) -> int:
        """Of the graph that a step of so many tokens replays."""
        return self.sizes[bisect.bisect_left(self.sizes, tokens)]

    def replay(self, size: int) -> T:
        """Run the forward over the inputs as they are now."""
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Torch collects garbage before every capture; what lives already need not be looked at every time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
