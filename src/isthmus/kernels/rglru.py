"""The real-gated linear recurrent unit over state pages, in plain torch.

De et al., Griffin: Mixing Gated Linear Recurrences with Local Attention, arXiv 2402.19427:

    state = exp(decay) * state + sqrt(1 - exp(2 * decay)) * x

A sequence's first token enters as it is.
"""

from __future__ import annotations

from torch import Tensor

from isthmus.kernels.recurrence import linear_recurrence
from isthmus.kernels.states import StateStep


def rglru(step: StateStep, view: Tensor, x: Tensor, decay: Tensor) -> Tensor:
    """One step of every sequence.

    Args:
        view: `[pages, C]`, each sequence's state.
        x: `[T, C]`, gated.
        decay: `[T, C]`, logarithms, none positive.

    Returns the states behind every token, `[T, C]` in x's dtype. All arithmetic is fp32.
    """
    decay = decay.float()
    gain = (1 - (2 * decay).exp_()).sqrt_()
    if step.fresh is not None:
        first = gain.index_select(0, step.starts).masked_fill_(step.fresh[:, None], 1)
        gain.index_copy_(0, step.starts, first)
    return linear_recurrence(step, view, decay.exp(), gain.mul_(x.float())).to(x.dtype)
