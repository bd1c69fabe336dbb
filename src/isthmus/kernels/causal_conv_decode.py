"""One token per sequence of a causal convolution, on the saved inputs where they lie.

A program has some channels of a few sequences, which read a channel's taps once.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.views import VECTOR_BYTES, stride


class Tile(NamedTuple):
    """How the kernel is built."""

    lanes: int  # sequences per program
    channels: int  # of each
    num_warps: int


TILE = Tile(4, 256, 4)
"""Taps, which lie apart, are read once for four sequences. Within 3 % of the fastest of eight on an H200."""


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_tokens", "page_vectors", "count"])
def _conv_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_tokens: tl.tensor,
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    x_token: tl.int64,
    out_token: tl.int64,
    page_vectors: tl.int32,
    count: tl.int32,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    o_lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    there, inside = o_lane < count, o_channel < CHANNELS
    page = tl.load(p_pages + o_lane, mask=there, other=0).to(tl.int64)
    token = tl.load(p_tokens + o_lane, mask=there, other=0).to(tl.int64)
    fresh = tl.load(p_fresh + o_lane, mask=there, other=1).to(tl.int32)
    live = (page != 0)[:, None] & inside[None, :]
    known = live & (fresh == 0)[:, None]
    # The factor VECTOR tells the compiler how wide it may load.
    p_rows = p_state + (page * page_vectors * VECTOR)[:, None] + o_channel[None, :]
    p_taps = p_weight + o_channel * WIDTH
    wait_for_previous(DEPENDENT)
    b_x = tl.load(p_x + (token * x_token)[:, None] + o_channel[None, :], mask=live, other=0.0)
    b_out = b_x.to(tl.float32) * tl.load(p_taps + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        b_out += tl.load(p_bias + o_channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH - 1):
        b_old = tl.load(p_rows + k * CHANNELS, mask=known, other=0.0)
        b_out += b_old.to(tl.float32) * tl.load(p_taps + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        if k > 0:
            tl.store(p_rows + (k - 1) * CHANNELS, b_old, mask=live)
    tl.store(p_rows + (WIDTH - 2) * CHANNELS, b_x.to(p_state.dtype.element_ty), mask=live)
    b_out = tl.where(live, b_out, 0.0)
    p_row = p_out + (token * out_token)[:, None] + o_channel[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def causal_conv_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    tile: Tile = TILE,
    early: bool,
) -> None:
    """`causal_conv` of n sequences with one token each, with fp32 sums.

    Args:
        view: `[pages, K - 1, C]` over the arena, changed in place; K is 2 or more.
        pages, fresh, tokens, early: as in `isthmus.kernels.gated_delta_decode.gated_delta_decode`.
        x: `[T, C]`, unit last stride.
        weight: `[C, K]`, contiguous.
        bias: `[C]`.
        out: `[T, C]`, unit last stride, written at `tokens`.
    """
    channels, width = weight.shape
    assert view.shape[1:] == (width - 1, channels), "a row per input that is kept"
    assert weight.is_contiguous(), "taps of a channel lie together"
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    if len(pages) == 0:
        return
    _conv_kernel[(triton.cdiv(channels, tile.channels), triton.cdiv(len(pages), tile.lanes))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        tokens,
        x,
        weight,
        x if bias is None else bias,
        out,
        stride(x, 0),
        stride(out, 0),
        page_bytes // VECTOR_BYTES,
        len(pages),
        WIDTH=width,
        CHANNELS=channels,
        BIAS=bias is not None,
        LANES=tile.lanes,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_C=min(tile.channels, triton.next_power_of_2(channels)),
        num_warps=tile.num_warps,
        **dependent_launch(early),
    )
