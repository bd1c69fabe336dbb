"""Lightning attention over state pages, in plain torch: linear attention with one decay per head.

    state = exp(-slope) * state + value key^T
    out   = state query

Qin et al., Lightning Attention-2, arXiv 2401.04658. It is what `isthmus.kernels.ssd` computes, with a constant decay.
"""

from __future__ import annotations

from torch import Tensor

from isthmus.kernels.ssd import CHUNK, decayed_attention
from isthmus.kernels.states import StateStep


def lightning_attention(
    step: StateStep, view: Tensor, query: Tensor, key: Tensor, value: Tensor, slope: Tensor, *, chunk: int = CHUNK
) -> Tensor:
    """One step of every sequence.

    Args:
        view: `[pages, H, V, K]`, each sequence's state.
        query, key: `[T, H, K]`.
        value: `[T, H, V]`.
        slope: `[H]`, none negative.

    Returns `[T, H, V]` in value's dtype. All arithmetic is fp32.
    """
    decay = -slope.float().expand(value.shape[:2])
    return decayed_attention(step, view, query, key, value, decay, decay.new_ones(()).expand_as(decay), chunk=chunk)
