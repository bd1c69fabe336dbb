"""The selective scan of Mamba over state pages, in plain torch.

A channel's state is a vector `[N]`. Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces,
arXiv 2312.00752:

    state = exp(rate * dt) * state + dt * x * B
    out   = state . C + skip * x                                     dt = softplus(dt)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.kernels.recurrence import linear_recurrence
from isthmus.kernels.states import StateStep

SLAB_BYTES = 1 << 24
"""Most temporary memory of the channels that are computed side by side, roughly: larger is not faster."""


def selective_scan(
    step: StateStep, view: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, skip: Tensor
) -> Tensor:
    """One step of every sequence.

    Args:
        view: `[pages, G, D, N]`, each sequence's state: D channels of each of G heads.
        x: `[T, G, D]`.
        dt: `[T, G, D]`, with its bias.
        b, c: `[T, G, N]`.
        rate: `[G, D, N]`, none positive.
        skip: `[G, D]`.

    Returns `[T, G, D]` in x's dtype. All arithmetic is fp32.
    """
    tokens, groups, channels = x.shape
    b, c = b.float()[:, :, None], c.float()[..., None]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    most = max(1, SLAB_BYTES // (tokens * groups * b.shape[-1] * 4 * 6))
    for i in range(0, channels, most):
        mine = slice(i, i + most)
        value, size = x[..., mine].float(), functional.softplus(dt[..., mine].float())
        decay = (size[..., None] * rate[:, mine].float()).exp_()
        states = linear_recurrence(step, view[:, :, mine], decay, (size * value)[..., None] * b)
        out[..., mine] = ((states @ c)[..., 0] + value * skip[:, mine].float()).to(x.dtype)
    return out
