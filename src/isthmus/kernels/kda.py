"""Kimi delta attention (Kimi Team, Kimi Linear, 2025): the gated delta rule with a decay for every channel of the keys.

The decay between two tokens of a chunk cannot be split into one factor of either without overflow: its logarithm may be
hundreds. It can at a token between them. So a chunk's triangle of products is cut into squares, each of the later and
the earlier half of a run of 2, 4, 8 .. tokens, whose factors both run towards the end of the earlier half: exponents
are never positive, and what becomes zero was zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.kernels.gated_delta import delta_rule
from isthmus.kernels.states import StateStep


def kimi_delta_rule(
    step: StateStep, view: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """As `isthmus.kernels.gated_delta.gated_delta_rule`, with decay `[T, heads, K]`."""
    return delta_rule(step, view, query, key, value, decay, beta, _products)


def _products(rows: Tensor, keys: Tensor, faded: Tensor) -> Tensor:
    count, heads, kinds, size, _ = rows.shape
    out = rows.new_zeros(count, heads, kinds, size, size)
    out.diagonal(dim1=-2, dim2=-1).copy_((rows * keys[:, :, None]).sum(-1))
    half = size // 2
    while half:
        _square(rows, keys, faded, half, out)
        half //= 2
    return out


def _square(rows: Tensor, keys: Tensor, faded: Tensor, half: int, out: Tensor) -> None:
    """The products of the later `half` tokens with the earlier `half` of every run of twice as many."""
    earlier, later = torch.unflatten(faded, 2, (-1, 2, half)).unbind(3)  # [N, H, runs, half, K]
    middle = earlier[..., -1:, :]
    right = torch.unflatten(keys, 2, (-1, 2, half))[:, :, :, 0] * (middle - earlier).exp_()
    left = torch.unflatten(rows, 3, (-1, 2, half))[:, :, :, :, 1] * (later - middle).exp_()[:, :, None]
    runs = earlier.shape[2]
    blocks = out.view(*out.shape[:3], runs, 2, half, runs, 2, half)
    squares = blocks[:, :, :, :, 1, :, :, 0].diagonal(dim1=3, dim2=5)  # [N, H, R, half, half, runs]
    squares.copy_((left @ right.transpose(3, 4)[:, :, None]).movedim(3, -1))
