"""The gated delta rule over state pages, in plain torch.

A head's state is a matrix `[K, V]` that maps keys to values. A token fades it, and then moves what it has for the
token's key towards the token's value:

    state = exp(decay) * state
    state = state + key (beta * (value - key state))
    out   = query state / sqrt(K)                                 queries and keys at unit length

A chunk of tokens is computed at once: what its tokens write solves a triangular system (the UT transform of Yang, Wang,
Zhang, Shen and Kim, Parallelizing Linear Transformers with the Delta Rule over Sequence Length, 2024; with decay:
Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024). Everything but one product with the state at the chunk's
start is computed for many chunks side by side. Exponents are differences of decays that are never positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isthmus.kernels.states import Grid, StateStep

CHUNK = 64
"""Most tokens of a chunk, a power of two."""

SLAB_BYTES = 1 << 24
"""Most temporary memory of the chunks that are computed side by side, roughly (measured: 32 times as much is half as
fast)."""

DECODE_BYTES = 1 << 22
"""Most states of decodes at a time: what stays in the processor's caches between reading and writing them back."""

UNIT = 1e-6
"""Added to the squared length of queries and keys."""

Products = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`rows [N, H, R, C, K]`, `keys [N, H, C, K]`, `faded [N, H, C, K or 1]` -> `[N, H, R, C, C]`, zero above the diagonal:
`sum_k rows[i, k] * keys[j, k] * exp(faded[i, k] - faded[j, k])` for tokens i and j <= i."""

Piece = tuple[Tensor, Tensor]
"""int64: chunks of a grid, and the sequences (of the grid's) that they are of."""


def gated_delta_rule(
    step: StateStep, view: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The rule with one decay per head and token.

    Args:
        view: `[pages, heads, K, V]`, each sequence's state.
        query, key: `[T, key heads, K]`, of any length; a key head serves `heads / key heads` heads in a row.
        value: `[T, heads, V]`.
        decay: `[T, heads]`, logarithms, none positive.
        beta: `[T, heads]`.

    Returns `[T, heads, V]` in query's dtype. All arithmetic is fp32.
    """
    return delta_rule(step, view, query, key, value, decay[..., None], beta, _products)


def delta_rule(
    step: StateStep,
    view: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    products: Products,
) -> Tensor:
    """As `gated_delta_rule`, with decay `[T, heads, K or 1]`, and the products of a chunk under such a decay."""
    inputs = _Inputs(query, key, value, decay, beta)
    tokens = len(value)
    out = value.new_empty((tokens + 1, *value.shape[1:]), dtype=query.dtype)  # the last: outputs of padding
    if len(step.decodes):
        _decodes(step, view, inputs, out)
    if len(step.chunks):
        _chunks(step, view, inputs, products, out)
    return out[:tokens]


@dataclass(frozen=True)
class _Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    def of(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """`[*, heads, ..]` in fp32 for tokens `[*]`, with a query (scaled) and a key of unit length for every head."""
        heads, query, key = self.value.shape[1], _unit(self.query[tokens]), _unit(self.key[tokens])
        query = query * key.shape[-1] ** -0.5
        if heads != key.shape[-2]:
            query, key = (x.repeat_interleave(heads // x.shape[-2], -2) for x in (query, key))
        return query, key, *(x[tokens].float() for x in (self.value, self.decay, self.beta))


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT)


def _decodes(step: StateStep, view: Tensor, inputs: _Inputs, out: Tensor) -> None:
    """One token of each sequence that has one."""
    most = max(1, DECODE_BYTES // (view[0].numel() * 4))
    for sequences in torch.split(step.decodes, most):
        tokens = step.starts[sequences]
        query, key, value, decay, beta = inputs.of(tokens)
        states = step.load(view, sequences).float().mul_(decay.exp_()[..., None])
        known, read = ((x[:, :, None] @ states).squeeze(2) for x in (key, query))
        write = (value - known) * beta[..., None]
        states.addcmul_(key[..., None], write[:, :, None])
        out[tokens] = (read + (query * key).sum(-1, keepdim=True) * write).to(out.dtype)
        step.store(view, states, sequences)


def _chunks(step: StateStep, view: Tensor, inputs: _Inputs, products: Products, out: Tensor) -> None:
    """All tokens of the sequences that have several."""
    longest = int(np.diff(step.query_start).max())
    grid = step.grid(min(CHUNK, 1 << (longest - 1).bit_length()))
    states = step.load(view, grid.sequences).float()
    _, heads, k_dim, v_dim = states.shape
    row_bytes = (8 * k_dim + 4 * v_dim + 4 * grid.size) * 4
    most = max(1, SLAB_BYTES // (heads * grid.size * row_bytes))
    for slab in _slabs(grid, most):
        chunks = torch.cat([chunks for chunks, _ in slab])
        tokens, padding = grid.tokens[chunks], grid.padding[chunks]
        open_chunks = _solve(inputs, tokens, padding, products)
        parts = open_chunks.split([len(chunks) for chunks, _ in slab])
        rows = torch.cat([part.close(states, members) for part, (_, members) in zip(parts, slab, strict=True)])
        out[grid.into[chunks]] = rows.transpose(1, 2).to(out.dtype)
    step.store(view, states, grid.sequences)


def _slabs(grid: Grid, most: int) -> Iterator[list[Piece]]:
    """All chunks in the order of their ranks, at most so many at a time, cut where the rank changes."""
    slab: list[Piece] = []
    room = most
    for chunks, members in grid.ranks:
        for piece in zip(torch.split(chunks, most), torch.split(members, most), strict=True):
            if len(piece[0]) > room:
                yield slab
                slab, room = [], most
            slab.append(piece)
            room -= len(piece[0])
    yield slab


@dataclass(frozen=True)
class _Open:
    """N chunks of C tokens, but for what they read of the state they begin with."""

    read: Tensor  # [N, H, 2 C, K]: what the tokens' writes, then the tokens' outputs, read of it
    write: Tensor  # [N, H, C, V]: written by the tokens if it was zero
    attention: Tensor  # [N, H, C, C]: of outputs to writes
    keys: Tensor  # [N, H, C, K]: of the writes, faded until the chunk's end
    fade: Tensor  # [N, H, K or 1, 1]: of the state in the chunk

    def split(self, counts: list[int]) -> Iterator[_Open]:
        """The first so many chunks, then the next, and so on."""
        columns = (torch.split(x, counts) for x in (self.read, self.write, self.attention, self.keys, self.fade))
        return (_Open(*row) for row in zip(*columns, strict=True))

    def close(self, states: Tensor, members: Tensor) -> Tensor:
        """Bring `states[members]` to the chunks' ends; the outputs `[N, H, C, V]`."""
        state = states[members]
        known, out = (self.read @ state).chunk(2, 2)
        write = self.write - known
        states[members] = (state * self.fade).add_(self.keys.transpose(2, 3) @ write)
        return out + self.attention @ write


def _solve(inputs: _Inputs, tokens: Tensor, padding: Tensor, products: Products) -> _Open:
    """Chunks of tokens `[N, C]`; padding neither fades the state nor writes to it."""
    query, key, value, decay, beta = (x.transpose(1, 2).contiguous() for x in inputs.of(tokens))
    beta = beta.masked_fill_(padding[:, None], 0)[..., None]
    faded = decay.masked_fill_(padding[:, None, :, None], 0).cumsum(2)
    since_start = faded.exp()
    system, attention = products(torch.stack((key, query), 2), key, faded).unbind(2)
    wanted = torch.cat((value, key * since_start), -1).mul_(beta)
    solved = torch.linalg.solve_triangular(system * beta, wanted, upper=False, unitriangular=True)
    write, known = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    end = faded[:, :, -1:]
    return _Open(
        torch.cat((known, query * since_start), 2),
        write,
        attention,
        key * (end - faded).exp(),
        end.exp().transpose(2, 3),
    )


def _products(rows: Tensor, keys: Tensor, faded: Tensor) -> Tensor:
    size = keys.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=keys.device).triu(1)
    fade = (faded - faded.transpose(2, 3)).masked_fill_(later, float("-inf")).exp_()
    return (rows @ keys.transpose(2, 3)[:, :, None]).mul_(fade[:, :, None])
