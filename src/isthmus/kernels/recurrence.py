"""First-order linear recurrences over state pages, in plain torch.

    state[t] = decay[t] * state[t - 1] + added[t]                   elementwise, 0 <= decay <= 1

All tokens of a step are computed at once, sequences of unlike length side by side, by an associative scan: `(a, x)`
then `(b, y)` is `(b a, b x + y)`. The tree of Brent and Kung (A Regular Layout for Parallel Adders, 1982) works in
place, with two products a token in as many rounds as twice the logarithm of the tokens. Nothing is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.kernels.states import StateStep


def linear_recurrence(step: StateStep, view: Tensor, decay: Tensor, added: Tensor) -> Tensor:
    """The states behind every token, `[T, *shape]`; the last of each sequence goes into its page.

    Args:
        view: `[pages, *shape]`.
        decay, added: fp32 `[T, *shape]`, contiguous. Both are overwritten; `added` is what is returned.
    """
    before = step.load(view).float()
    if step.only_decodes:
        step.store(view, added.addcmul_(decay, before))
        return added
    starts = step.starts
    added.index_add_(0, starts, before.mul_(decay[starts]))
    first = torch.zeros(len(added), dtype=torch.bool, device=added.device)
    first[starts] = True
    scan_(decay, added, first)
    step.store(view, added[step.ends])
    return added


def scan_(decay: Tensor, added: Tensor, first: Tensor) -> None:
    """`added[t] += decay[t] * added[t - 1]` for all rows in order, in place, but for rows without a predecessor.

    `first`, bool `[T]`, says which those are. Decay and `first` are used up.

    What one sequence computed never meets another's, not even times zero.
    """
    count, width = len(added), 1
    while 2 * width <= count:
        later, earlier = slice(2 * width - 1, count, 2 * width), slice(width - 1, count - width, 2 * width)
        _combine(decay, added, first, later, earlier)
        decay[later] *= decay[earlier]
        first[later] |= first[earlier]
        width *= 2
    while width > 1:
        width //= 2
        later, earlier = slice(3 * width - 1, count, 2 * width), slice(2 * width - 1, count - width, 2 * width)
        _combine(decay, added, first, later, earlier)


def _combine(decay: Tensor, added: Tensor, first: Tensor, later: slice, earlier: slice) -> None:
    carried = decay[later] * added[earlier]
    carried[first[later]] = 0
    added[later] += carried
