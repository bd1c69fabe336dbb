"""The delta rules over chunks, as the kernels of fla-core compute them.

The library takes sequences that lie end to end, their states `[M, heads, K, V]` apart, and queries and keys of unit
length:

    pages -> states -> library -> states -> pages
    batch -> chunks' tokens, end to end -> library -> outputs -> batch

What it would work out for itself from the sequences' bounds, looking at the device for it, it is given. The forwards
under its public functions take that, and keep nothing for a backward; they are what was read of the versions below.

Yang and Zhang, FLA: A Triton-Based Library for Hardware-Efficient Implementations of Linear Attention Mechanism, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata

import numpy as np
import torch
from torch import Tensor

from isthmus.kernels.states import Int64, StateStep
from isthmus.kernels.take_heads import put_heads, take_heads

CHUNK = 64
"""Tokens of a chunk, what the library's kernels are made for."""

MEMBERS = 128
"""Most sequences of one call: their states are copied out of the pages and back."""

WIDEST_KEY = 256
"""Of a head, that the library takes."""

DTYPES = (torch.bfloat16, torch.float16)
"""Of queries, keys and values. In float32 the library would multiply in TF32 and be no reference to anybody."""

VERSIONS = ("0.5", "0.6")
"""Of fla-core, whose source was read."""

Forward = Callable[..., tuple[Tensor, Tensor]]
"""Outputs and states of sequences end to end, for arguments by the library's names."""


@dataclass(frozen=True)
class Packed:
    """Some of a step's sequences with several tokens, M of them, end to end: n tokens in N chunks."""

    chunks: Tensor  # int64 [N, 2]: which of the M, and the how manieth chunk of it
    bounds: Tensor  # int64 [M + 1]: where each begins and ends among the n
    tokens: Tensor  # int64 [n] of the flat batch
    step: StateStep  # whose states are those of the M alone
    whole: bool  # the tokens are all that the flat batch has, in order


def pack(query_start: Int64, most: int) -> list[tuple[Int64, ...]]:
    """All sequences with several tokens, at most so many at a time: the three arrays of `Packed`, and which they are.

    What the library's kernels are given begins at multiples of 16 bytes where the arrays lie one behind the other:
    they are compiled for it.
    """
    sequences = np.flatnonzero(np.diff(query_start) > 1)
    return [_pack(query_start, sequences[i : i + most]) for i in range(0, len(sequences), most)]


def _pack(query_start: Int64, sequences: Int64) -> tuple[Int64, ...]:
    starts = query_start[sequences]
    counts = query_start[sequences + 1] - starts
    per, ends = -(-counts // CHUNK), np.cumsum(counts)
    member = np.repeat(np.arange(len(per)), per)
    rank = np.arange(len(member)) - np.repeat(np.cumsum(per) - per, per)
    tokens = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return np.stack((member, rank), 1), np.concatenate(([0], ends)), tokens, sequences


def version() -> str | None:
    """Of fla-core as installed."""
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return None


def missing() -> str | None:
    """Why its functions cannot be used here; None: they can."""
    found, how = version(), "pip install 'isthmus[fla]'"
    if found is None:
        return f"fla-core is not installed: {how}"
    known = ".".join(found.split(".")[:2]) in VERSIONS
    return None if known else f"fla-core {found} is not one of {', '.join(VERSIONS)}: {how}"


@cache
def forwards() -> Mapping[str, Forward]:
    """The library's functions, by our names of the rules. Imports it, which takes seconds."""
    gated_delta = import_module("fla.ops.gated_delta_rule.chunk").chunk_gated_delta_rule_fwd
    kimi_delta = import_module("fla.ops.kda.chunk_fwd").chunk_kda_fwd

    def gated_delta_rule(**arguments: object) -> tuple[Tensor, Tensor]:
        _, out, _, states, *_ = gated_delta(**arguments)
        return out, states

    def kimi_delta_rule(**arguments: object) -> tuple[Tensor, Tensor]:
        out, states, *_ = kimi_delta(**arguments)
        return out, states

    return {"gated_delta_rule": gated_delta_rule, "kimi_delta_rule": kimi_delta_rule}


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Does the library take such numbers?"""
    return query.dtype in DTYPES and query.dtype == key.dtype == value.dtype and key.shape[-1] <= WIDEST_KEY


def library_rule(
    forward: Forward,
    packed: Sequence[Packed],
    view: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
) -> Tensor:
    """As `isthmus.kernels.gated_delta.gated_delta_rule`, of the sequences in `packed`; other outputs hold anything.

    A token's numbers are contiguous. Queries and keys are rounded to their dtype at unit length, as the library does.
    """
    assert view.dtype == torch.float32, "states are fp32"
    out = value.new_empty(value.shape)
    for part in packed:
        states = part.step.load(view)
        rows, states = forward(
            q=take_heads(query, part.tokens, unit=True)[None],
            k=take_heads(key, part.tokens, unit=True)[None],
            v=take_heads(value, part.tokens)[None],
            g=decay.index_select(0, part.tokens)[None],
            beta=beta.index_select(0, part.tokens)[None],
            scale=key.shape[-1] ** -0.5,
            initial_state=states,
            output_final_state=True,
            cu_seqlens=part.bounds,
            chunk_indices=part.chunks,
        )
        part.step.store(view, states)
        if part.whole:
            return rows[0]
        put_heads(out, part.tokens, rows[0])
    return out
