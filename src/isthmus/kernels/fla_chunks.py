"""The delta rules over chunks, as the kernels of fla-core compute them.

The library takes sequences that lie end to end, their states `[M, heads, K, V]` apart, and queries and keys of unit
length:

    pages -> states -> library -> states -> pages
    batch -> chunks' tokens, end to end -> library -> outputs -> batch

What it would work out for itself from the sequences' bounds, looking at the device for it, it is given. The forwards
under its public functions take that, and keep nothing for a backward; they are what was read of the versions below:

- How many programs a launch has follows from shapes alone, so a graph holds it whatever the numbers are. A chunk that
  begins behind its sequence's end is nobody's: it reads and writes no token. A sequence without tokens keeps its state.
- No kernel is tuned by a number of tokens, sequences or chunks: it is tuned once for each size of heads.
- What it makes of `cu_seqlens` (where each sequence's chunks begin) it remembers by the tensor's identity. So bounds
  whose numbers change where they lie are another object in every forward, or what was made of the old ones is used.

Yang and Zhang, FLA: A Triton-Based Library for Hardware-Efficient Implementations of Linear Attention Mechanism, 2024.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.states import Int64
from isthmus.kernels.take_heads import put_heads, take_heads
from isthmus.kernels.views import VECTOR_BYTES

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
    """Some of a step's sequences with several tokens, M of them, end to end: n tokens in N chunks.

    In a graph padding is among them, with page 0: of members, some of which have no tokens, of tokens, some of which
    are there twice, and of chunks, which begin behind the end of their member.
    """

    chunks: Tensor  # int64 [N, 2]: which of the M, and the how manieth chunk of it
    bounds: Tensor  # int64 [M + 1]: where each begins and ends among the n; another object in every forward
    tokens: Tensor  # int64 [n] of the flat batch
    pages: Tensor  # int64 [M], physical
    fresh: Tensor  # bool [M]: the state is zero, whatever the page holds
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
    ends = np.cumsum(counts)
    tokens = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return cut(counts), np.concatenate(([0], ends)), tokens, sequences


def cut(counts: Int64) -> Int64:
    """`[N, 2]`: the chunks of sequences of so many tokens, as in `Packed`."""
    per = -(-counts // CHUNK)
    member = np.repeat(np.arange(len(per)), per)
    rank = np.arange(len(member)) - np.repeat(np.cumsum(per) - per, per)
    return np.stack((member, rank), 1)


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


ELEMENTS = 4096
"""Of a state, that a program copies."""


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_bounds", "page_vectors"])
def _take_states_kernel(
    p_view: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_bounds: tl.tensor,
    p_out: tl.tensor,
    page_vectors: tl.int32,
    SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_member = tl.program_id(0).to(tl.int64)
    if tl.load(p_bounds + i_member) < tl.load(p_bounds + i_member + 1):
        page = tl.load(p_pages + i_member).to(tl.int64)
        known = tl.where(page != 0, SIZE * (1 - tl.load(p_fresh + i_member).to(tl.int32)), 0)
        o_state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        b_state = tl.load(p_view + page * page_vectors * VECTOR + o_state, mask=o_state < known, other=0.0)
        tl.store(p_out + i_member * SIZE + o_state, b_state, mask=o_state < SIZE)


@triton.jit(do_not_specialize=["p_pages", "page_vectors"])
def _put_states_kernel(
    p_view: tl.tensor,
    p_pages: tl.tensor,
    p_states: tl.tensor,
    page_vectors: tl.int32,
    SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_member = tl.program_id(0).to(tl.int64)
    page = tl.load(p_pages + i_member).to(tl.int64)
    if page != 0:
        o_state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = o_state < SIZE
        b_state = tl.load(p_states + i_member * SIZE + o_state, mask=inside)
        tl.store(p_view + page * page_vectors * VECTOR + o_state, b_state, mask=inside)


def _geometry(view: Tensor) -> tuple[int, int, int, int]:
    """Programs of a member, 16 bytes of a page, numbers of a state, numbers in 16 bytes."""
    size, page_bytes = view[0].numel(), view.stride(0) * view.itemsize
    assert view[0].is_contiguous(), "a state's numbers lie together"
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    return triton.cdiv(size, ELEMENTS), page_bytes // VECTOR_BYTES, size, VECTOR_BYTES // view.itemsize


def take_states(view: Tensor, packed: Packed) -> Tensor:
    """A copy of the states `[M, heads, K, V]`: zeros where they are fresh or padding's, anything without tokens."""
    programs, vectors, size, vector = _geometry(view)
    out = view.new_empty(len(packed.pages), *view.shape[1:])
    fresh = packed.fresh.view(torch.uint8)
    _take_states_kernel[(len(out), programs)](
        view, packed.pages, fresh, packed.bounds, out, vectors, SIZE=size, VECTOR=vector, BLOCK=ELEMENTS, num_warps=4
    )
    return out


def put_states(view: Tensor, packed: Packed, states: Tensor) -> None:
    """Put them back, but not padding's."""
    programs, vectors, size, vector = _geometry(view)
    assert states.dtype == view.dtype, "states keep their dtype"
    assert states.is_contiguous(), "numbers by address"
    _put_states_kernel[(len(states), programs)](
        view, packed.pages, states, vectors, SIZE=size, VECTOR=vector, BLOCK=ELEMENTS, num_warps=4
    )


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
        rows, states = forward(
            q=take_heads(query, part.tokens, unit=True)[None],
            k=take_heads(key, part.tokens, unit=True)[None],
            v=take_heads(value, part.tokens)[None],
            g=decay.index_select(0, part.tokens)[None],
            beta=beta.index_select(0, part.tokens)[None],
            scale=key.shape[-1] ** -0.5,
            initial_state=take_states(view, part),
            output_final_state=True,
            cu_seqlens=part.bounds,
            chunk_indices=part.chunks,
        )
        put_states(view, part, states)
        if part.whole:
            return rows[0]
        put_heads(out, part.tokens, rows[0])
    return out
