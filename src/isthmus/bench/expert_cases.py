"""What experts take: their pairs sorted and both products, beside torch's grouped products of pairs sorted before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from isthmus.bench.clock import gpu_time
from isthmus.bench.layouts import DTYPE
from isthmus.kernels.expert_rows import are_few, expert_rows
from isthmus.kernels.experts import config_of, expert_linear, sort_pairs

Row = dict[str, Any]

ROUTINGS = 8
"""In turn: so that the weights of the few experts of a few tokens come from memory."""


@dataclass(frozen=True)
class Shape:
    """The experts of one layer."""

    name: str
    experts: int
    top_k: int
    width: int
    inner: int
    transposed: bool = False

    def weights(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gate and up `[experts, 2 inner, width]`, down `[experts, width, inner]`; or the last two in turn."""
        sizes = ((2 * self.inner, self.width), (self.width, self.inner))
        up, down = (
            torch.randn(self.experts, *(pair[::-1] if self.transposed else pair), dtype=DTYPE, device=device)
            for pair in sizes
        )
        return up, down


SHAPES = (
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, transposed=True),
    Shape("Granite-4-H-Tiny", 64, 6, 1536, 512),
    Shape("Kimi-Linear-48B-A3B", 256, 8, 2304, 1024),
    Shape("Qwen3-Next-80B-A3B", 512, 10, 2048, 512),
)
TOKENS = (1, 2, 8, 64, 256, 512, 2048, 8192)


def measure(device: torch.device, copy: float) -> list[Row]:
    """A row for each shape and number of tokens; `copy` is the bytes a second of a copy."""
    rows = []
    for shape in SHAPES:
        weights = shape.weights(device)
        rows += [_measure(shape, *weights, tokens, copy) for tokens in TOKENS]
        del weights
    return rows


def _measure(shape: Shape, up: Tensor, down: Tensor, tokens: int, copy: float) -> Row:
    torch.manual_seed(0)
    device, pairs = up.device, tokens * shape.top_k
    x = torch.randn(tokens, shape.width, dtype=DTYPE, device=device)
    inner = torch.randn(pairs, shape.inner, dtype=DTYPE, device=device)
    routings = [torch.rand(tokens, shape.experts, device=device).topk(shape.top_k).indices for _ in range(ROUTINGS)]
    built = config_of(pairs, shape.experts, DTYPE.itemsize)
    few = are_few(pairs, shape.experts, DTYPE.itemsize, transposed=shape.transposed)

    def ours(expert_of: Tensor) -> None:
        if few:
            expert_rows(x, expert_of, up, None, top_k=shape.top_k, early=True)
            expert_rows(inner, expert_of, down, None, top_k=1, early=True)
            return
        work = sort_pairs(expert_of, shape.experts, built.block_m, early=True)
        expert_linear(x, work, up, None, top_k=shape.top_k, transposed=shape.transposed, early=True)
        expert_linear(inner, work, down, None, top_k=1, transposed=shape.transposed, early=True)

    timing = gpu_time([partial(ours, routing.reshape(-1)) for routing in routings])
    theirs = gpu_time([partial(_grouped, shape, up, down, x, inner, routing) for routing in _sorted(shape, routings)])
    touched = sum(int((torch.bincount(routing.reshape(-1)) > 0).sum()) for routing in routings) / ROUTINGS
    weights = touched * (up[0].nbytes + down[0].nbytes)
    flops = 2 * pairs * 3 * shape.width * shape.inner
    return {
        "shape": shape.name,
        "tokens": tokens,
        "us": round(timing.us, 1),
        "grouped_mm_us": round(theirs.us, 1),
        "weights_gb_per_s": round(weights / timing.us / 1e3, 1),
        "of_copy": round(weights / timing.us * 1e6 / copy, 3),
        "tflops": round(flops / timing.us / 1e6, 1),
        "samples": [round(us, 1) for us in timing.samples],
    }


def _sorted(shape: Shape, routings: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(the token of each pair, where each expert's end), pairs in the order of their experts."""
    found = []
    for routing in routings:
        expert_of, order = routing.reshape(-1).sort()
        ends = torch.searchsorted(expert_of, torch.arange(1, shape.experts + 1, device=routing.device))
        found.append((order // shape.top_k, ends.int()))
    return found


def _grouped(shape: Shape, up: Tensor, down: Tensor, x: Tensor, inner: Tensor, routing: tuple[Tensor, Tensor]) -> None:
    token_of, ends = routing
    for rows, weight in ((x[token_of], up), (inner, down)):
        grouped_mm(rows, weight if shape.transposed else weight.transpose(1, 2), offs=ends)
