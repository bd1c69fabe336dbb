"""Structured state space duality over state pages, in plain torch.

A head's state is a matrix `[P, N]`. A token fades it and adds the outer product of its value and its key:

    state = exp(decay) * state + gain * value key^T
    out   = state query + skip * value

Mamba-2 calls query, key and value C, B and x, and takes decay and gain from a step size; lightning attention has one
decay per head and a gain of 1. A chunk of tokens is computed at once, as attention under a mask of decays, and states
pass from chunk to chunk (Dao and Gu, Transformers are SSMs, arXiv 2405.21060). Exponents are differences of sums of
decays that are never positive; the sums are fp64, because a small difference of two large ones may decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from isthmus.kernels.states import StateStep

CHUNK = 64
"""Tokens of a chunk, at most. It changes the work, not the result."""

SLAB_BYTES = 1 << 28
"""Most temporary memory of the sequences or chunks that are computed side by side, roughly."""


def ssd(
    step: StateStep,
    view: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    skip: Tensor,
    *,
    limit: tuple[float, float] = (0.0, float("inf")),
    chunk: int = CHUNK,
) -> Tensor:
    """Mamba-2: `dt = clamp(softplus(dt + dt_bias), *limit)`, `decay = rate * dt`, `gain = dt`.

    Args:
        view: `[pages, H, P, N]`, each sequence's state.
        query, key: `[T, G, N]`; a group serves `H / G` heads in a row.
        value: `[T, H, P]`.
        dt: `[T, H]`, as projected.
        dt_bias, rate, skip: `[H]`; no rate is positive.

    Returns `[T, H, P]` in value's dtype. All arithmetic is fp32.
    """
    size = functional.softplus(dt.float() + dt_bias.float()).clamp(*limit)
    return decayed_attention(step, view, query, key, value, size * rate.float(), size, skip, chunk=chunk)


def decayed_attention(
    step: StateStep,
    view: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    gain: Tensor,
    skip: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """As `ssd`, with decay (logarithms, none positive) and gain `[T, H]`."""
    inputs = _Inputs(query, key, value, decay, gain)
    tokens = len(value)
    out = value.new_empty((tokens + 1, *value.shape[1:]))  # the last: outputs of padding
    state_bytes = view[0].numel() * 4
    for sequences in torch.split(step.decodes, max(1, SLAB_BYTES // (3 * state_bytes))):
        _decodes(step, view, inputs, sequences, out)
    if len(step.chunks):
        _chunks(step, view, inputs, chunk, out)
    out = out[:tokens]
    return out if skip is None else out.addcmul_(value, skip.to(value.dtype)[:, None])


@dataclass(frozen=True)
class _Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    gain: Tensor


def _decodes(step: StateStep, view: Tensor, inputs: _Inputs, sequences: Tensor, out: Tensor) -> None:
    """One token of each of these sequences."""
    tokens = step.starts[sequences]
    query, key = inputs.query[tokens].float(), inputs.key[tokens].float()
    value = inputs.value[tokens].float() * inputs.gain[tokens].float()[..., None]
    states = step.load(view, sequences).float().mul_(inputs.decay[tokens].float().exp_()[..., None, None])
    groups = (key.shape[1], -1)
    grouped = torch.unflatten(states, 1, groups)  # [S, G, H / G, P, N]
    grouped.addcmul_(torch.unflatten(value, 1, groups)[..., None], key[:, :, None, None])
    read = grouped.flatten(2, 3) @ query[..., None]
    out[tokens] = read.view(value.shape).to(out.dtype)
    step.store(view, states, sequences)


def _chunks(step: StateStep, view: Tensor, inputs: _Inputs, chunk: int, out: Tensor) -> None:
    """All tokens of the sequences that have several, the first chunk of each, then the second, and so on.

    A sequence's state waits for its next chunk in its page.
    """
    size = min(chunk, int(np.diff(step.query_start).max()))
    grid = step.grid(size)
    _, heads, p, n = view.shape
    most = max(1, SLAB_BYTES // (heads * (size * (16 * size + 16 * p + 8 * n) + 12 * p * n)))
    later = torch.ones(size, size, dtype=torch.bool, device=view.device).triu(1)
    for rank, (chunks, members) in enumerate(grid.ranks):
        for part, of in zip(torch.split(chunks, most), torch.split(members, most), strict=True):
            sequences, tokens, real = grid.sequences[of], grid.tokens[part], ~grid.padding[part]
            states = step.load(view, sequences) if rank == 0 else view.index_select(0, step.pages[sequences])
            states = states.float()
            rows = _chunk(states, inputs, tokens, real, later)
            out[grid.into[part]] = rows.transpose(1, 2).to(out.dtype)
            step.store(view, states, sequences)


def _chunk(states: Tensor, inputs: _Inputs, tokens: Tensor, real: Tensor, later: Tensor) -> Tensor:
    """One chunk of M sequences each: `states` `[M, H, P, N]` to its end, in place; the outputs `[M, H, C, P]`.

    Padding (not `real`) neither fades the state nor adds to it.
    """
    query, key = (x[tokens].float().transpose(1, 2) for x in (inputs.query, inputs.key))  # [M, G, C, N]
    value = (inputs.value[tokens].float() * (inputs.gain[tokens].float() * real[..., None])[..., None]).transpose(1, 2)
    faded = (inputs.decay[tokens].double() * real[..., None]).cumsum(1).transpose(1, 2)  # [M, H, C]
    groups = (key.shape[1], -1)
    fade = (faded[..., :, None] - faded[..., None, :]).float().masked_fill_(later, float("-inf")).exp_()
    torch.unflatten(fade, 1, groups).mul_((query @ key.transpose(2, 3))[:, :, None])
    out = fade @ value
    since_start, until_end = faded.float().exp_(), (faded[..., -1:] - faded).float().exp_()
    before = query[:, :, None] @ torch.unflatten(states, 1, groups).transpose(3, 4)  # [M, G, H / G, C, P]
    out.addcmul_(before.flatten(1, 2), since_start[..., None])
    added = torch.unflatten(value * until_end[..., None], 1, groups).transpose(3, 4) @ key[:, :, None]
    states.mul_(since_start[..., -1:, None]).add_(added.flatten(1, 2))
    return out
