"""A causal convolution of prefill chunks and decodes together, out of the saved inputs where they lie.

Two launches: the outputs of all tokens, and then, when nobody reads them any more, the inputs that are kept. An input
before a sequence's first token of the step lies in its page, or is zero where the sequence begins.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.views import VECTOR_BYTES, stride


class Tile(NamedTuple):
    """How the kernels are built."""

    tokens: int  # of a program that computes outputs
    channels: int  # of any program
    num_warps: int


TILE = Tile(32, 128, 4)
"""A row of 256 bytes at two bytes a channel, and sums that stay in registers."""


@triton.jit
def _saved(
    p_state: tl.tensor,
    b_page: tl.tensor,
    b_row: tl.tensor,
    o_channel: tl.tensor,
    b_known: tl.tensor,
    page_vectors: tl.int32,
    CHANNELS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """`[rows, channels]` of the pages; zero where not known. The factor VECTOR tells how wide loads may be."""
    p_row = p_state + b_page * page_vectors * VECTOR + b_row * CHANNELS
    mask = b_known[:, None] & (o_channel < CHANNELS)[None, :]
    return tl.load(p_row[:, None] + o_channel[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_starts", "p_owner", "page_vectors", "tokens"])
def _conv_outputs_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_starts: tl.tensor,
    p_owner: tl.tensor,
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    x_token: tl.int64,
    page_vectors: tl.int32,
    tokens: tl.int32,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live, inside = o_token < tokens, o_channel < CHANNELS
    b_owner = tl.load(p_owner + o_token, mask=live, other=0).to(tl.int64)
    b_since = o_token - tl.load(p_starts + b_owner, mask=live, other=0).to(tl.int64)
    b_page = tl.load(p_pages + b_owner, mask=live, other=0).to(tl.int64)
    b_fresh = tl.load(p_fresh + b_owner, mask=live, other=1).to(tl.int32)
    b_old = live & (b_since < WIDTH - 1) & (b_fresh == 0) & (b_page != 0)
    b_out = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        b_out += tl.load(p_bias + o_channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    p_own = p_x + (o_token * x_token)[:, None] + o_channel[None, :]
    for k in tl.static_range(WIDTH):
        b_tap = tl.load(p_weight + o_channel * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        b_here = live & (b_since >= WIDTH - 1 - k)
        b_x = tl.load(p_own - (WIDTH - 1 - k) * x_token, mask=b_here[:, None] & inside[None, :], other=0.0)
        b_out += b_x.to(tl.float32) * b_tap[None, :]
    if tl.max(b_old.to(tl.int32), 0) > 0:
        for k in tl.static_range(WIDTH - 1):
            b_tap = tl.load(p_weight + o_channel * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
            b_known = b_old & (b_since < WIDTH - 1 - k)
            b_kept = _saved(p_state, b_page, b_since + k, o_channel, b_known, page_vectors, CHANNELS, VECTOR)
            b_out += b_kept.to(p_x.dtype.element_ty).to(tl.float32) * b_tap[None, :]
    p_row = p_out + (o_token * CHANNELS)[:, None] + o_channel[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_starts", "p_ends", "page_vectors"])
def _conv_inputs_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_starts: tl.tensor,
    p_ends: tl.tensor,
    p_x: tl.tensor,
    x_token: tl.int64,
    page_vectors: tl.int32,
    KEEP: tl.constexpr,
    CHANNELS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    i_sequence = tl.program_id(0)
    page = tl.load(p_pages + i_sequence).to(tl.int64)
    if page != 0:
        o_row = tl.arange(0, BLOCK_K)
        o_channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = o_channel < CHANNELS
        start = tl.load(p_starts + i_sequence).to(tl.int64)
        o_token = tl.load(p_ends + i_sequence).to(tl.int64) + 1 - KEEP + o_row
        b_here = (o_row < KEEP) & (o_token >= start)
        p_own = p_x + (o_token * x_token)[:, None] + o_channel[None, :]
        b_new = tl.load(p_own, mask=b_here[:, None] & inside[None, :], other=0.0).to(p_state.dtype.element_ty)
        known = KEEP * (1 - tl.load(p_fresh + i_sequence).to(tl.int32))  # rows of the page
        b_page = page + tl.zeros_like(o_token)
        b_known = (o_row < known) & (o_token < start)
        b_old = _saved(p_state, b_page, KEEP + o_token - start, o_channel, b_known, page_vectors, CHANNELS, VECTOR)
        tl.debug_barrier()  # all rows are read before any is written
        p_row = p_state + page * page_vectors * VECTOR + (o_row * CHANNELS)[:, None] + o_channel[None, :]
        b_row = tl.where(b_here[:, None], b_new, b_old)
        tl.store(p_row, b_row, mask=(o_row < KEEP)[:, None] & inside[None, :])


def causal_conv_varlen(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    starts: Tensor,
    ends: Tensor,
    owner: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tile: Tile = TILE,
) -> Tensor:
    """`causal_conv` of S sequences that lie one behind the other in a flat batch of T tokens, with fp32 sums.

    Args:
        view: `[pages, K - 1, C]` over the arena, changed in place; K is 2 or more.
        pages: `[S]`, physical; a sequence with page 0 is padding, of which nothing is known and nothing is kept.
        fresh: `[S]`, not zero where nothing was computed before, whatever the page holds.
        starts, ends: `[S]`, each sequence's first and last token.
        owner: `[T]`, the sequence of each token.
        x: `[T, C]`, unit last stride.
        weight: `[C, K]`, contiguous.
        bias: `[C]`.

    Returns `[T, C]`, contiguous, in x's dtype.
    """
    channels, width = weight.shape
    assert view.shape[1:] == (width - 1, channels), "a row per input that is kept"
    assert weight.is_contiguous(), "taps of a channel lie together"
    assert x.stride(1) == 1 or channels == 1, "channels of a token are contiguous"
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    block_c = min(tile.channels, triton.next_power_of_2(channels))
    columns, vectors = triton.cdiv(channels, block_c), page_bytes // VECTOR_BYTES
    flags = fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _conv_outputs_kernel[(triton.cdiv(len(x), tile.tokens), columns)](
        view,
        pages,
        flags,
        starts,
        owner,
        x,
        weight,
        x if bias is None else bias,
        out,
        stride(x, 0),
        vectors,
        len(x),
        WIDTH=width,
        CHANNELS=channels,
        BIAS=bias is not None,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_T=tile.tokens,
        BLOCK_C=block_c,
        num_warps=tile.num_warps,
    )
    _conv_inputs_kernel[(len(pages), columns)](
        view,
        pages,
        flags,
        starts,
        ends,
        x,
        stride(x, 0),
        vectors,
        KEEP=width - 1,
        CHANNELS=channels,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_K=triton.next_power_of_2(width - 1),
        BLOCK_C=block_c,
        num_warps=tile.num_warps,
    )
    return out
