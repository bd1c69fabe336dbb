"""One token per sequence of Mamba's selective scan, on states where they lie: each is read once and written once.

A program has some channels of a few sequences. The rates are as large as a state: sequences side by side read them
once.
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
from isthmus.kernels.ssd_decode import softplus, strides
from isthmus.kernels.views import VECTOR_BYTES, stride


class Tile(NamedTuple):
    """How the kernel is built."""

    lanes: int  # sequences per program
    elements: int  # of each one's state
    num_warps: int


TILE = Tile(4, 1024, 4)
"""Rates are read once for four states. With one sequence alone there are still enough programs for a large GPU."""


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_tokens", "page_vectors", "count"])
def _scan_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_tokens: tl.tensor,
    p_x: tl.tensor,
    p_dt: tl.tensor,
    p_b: tl.tensor,
    p_c: tl.tensor,
    p_rate: tl.tensor,
    p_skip: tl.tensor,
    p_out: tl.tensor,
    x_token: tl.int64,
    x_head: tl.int64,
    dt_token: tl.int64,
    dt_head: tl.int64,
    b_token: tl.int64,
    b_head: tl.int64,
    c_token: tl.int64,
    c_head: tl.int64,
    out_token: tl.int64,
    page_vectors: tl.int32,
    count: tl.int32,
    D_DIM: tl.constexpr,
    N_DIM: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_channel = tl.program_id(0)
    i_head = tl.program_id(1)
    o_lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    o_channel = i_channel * BLOCK_D + tl.arange(0, BLOCK_D)
    o_state = tl.arange(0, BLOCK_N)
    live_channel, live_state = o_channel < D_DIM, o_state < N_DIM
    o_own = i_head * (D_DIM * N_DIM) + o_channel[:, None] * N_DIM + o_state[None, :]

    there = o_lane < count
    page = tl.load(p_pages + o_lane, mask=there, other=0).to(tl.int64)
    token = tl.load(p_tokens + o_lane, mask=there, other=0).to(tl.int64)
    fresh = tl.load(p_fresh + o_lane, mask=there, other=1).to(tl.int32)
    # Of padding everything is read as zero, and so is what comes out.
    live = page != 0
    rows = live[:, None] & live_channel[None, :]
    columns = live[:, None] & live_state[None, :]
    inside = rows[:, :, None] & live_state[None, None, :]
    # The factor VECTOR tells the compiler how wide it may load.
    p_own = p_state + (page * page_vectors * VECTOR)[:, None, None] + o_own[None, :, :]
    b_state = tl.load(p_own, mask=inside & (fresh == 0)[:, None, None], other=0.0)
    wait_for_previous(DEPENDENT)
    b_rate = tl.load(p_rate + o_own, mask=live_channel[:, None] & live_state[None, :], other=0.0).to(tl.float32)
    b_skip = tl.load(p_skip + i_head * D_DIM + o_channel, mask=live_channel, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + (token * x_token)[:, None] + i_head * x_head + o_channel[None, :], mask=rows, other=0.0)
    b_dt = tl.load(p_dt + (token * dt_token)[:, None] + i_head * dt_head + o_channel[None, :], mask=rows, other=0.0)
    b_b = tl.load(p_b + (token * b_token)[:, None] + i_head * b_head + o_state[None, :], mask=columns, other=0.0)
    b_c = tl.load(p_c + (token * c_token)[:, None] + i_head * c_head + o_state[None, :], mask=columns, other=0.0)
    b_x, b_b, b_c = b_x.to(tl.float32), b_b.to(tl.float32), b_c.to(tl.float32)
    b_size = softplus(b_dt.to(tl.float32))
    b_state = b_state.to(tl.float32) * tl.exp(b_size[:, :, None] * b_rate[None, :, :])
    b_state += (b_size * b_x)[:, :, None] * b_b[:, None, :]
    tl.store(p_own, b_state.to(p_state.dtype.element_ty), mask=inside)
    b_out = tl.sum(b_state * b_c[:, None, :], 2) + b_x * b_skip[None, :]
    p_row = p_out + (token * out_token)[:, None] + i_head * D_DIM + o_channel[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=there[:, None] & live_channel[None, :])


def scan_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rate: Tensor,
    skip: Tensor,
    out: Tensor,
    *,
    tile: Tile = TILE,
    early: bool,
) -> None:
    """`isthmus.kernels.selective_scan.selective_scan` of n sequences with one token each.

    Args:
        view: `[pages, G, D, N]` over the arena, changed in place.
        pages, fresh, tokens, early: as in `isthmus.kernels.gated_delta_decode.gated_delta_decode`.
        x: `[T, G, D]`, unit last stride, as dt, b and c have.
        dt: `[T, G, D]`, with its bias.
        b, c: `[T, G, N]`.
        rate: `[G, D, N]`, contiguous.
        skip: `[G, D]`, contiguous.
        out: `[T, G, D]`, channels of a token contiguous, written at `tokens`.
    """
    _, heads, d_dim, n_dim = view.shape
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    assert rate.is_contiguous(), "rates lie as states do"
    assert skip.is_contiguous(), "numbers of channels lie together"
    assert out[0].is_contiguous(), "channels of a token are contiguous"
    block_n = triton.next_power_of_2(n_dim)
    block_d = min(max(1, tile.elements // block_n), triton.next_power_of_2(d_dim))
    if len(pages) == 0:
        return
    _scan_kernel[(triton.cdiv(d_dim, block_d), heads, triton.cdiv(len(pages), tile.lanes))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        tokens,
        *(x, dt, b, c, rate, skip, out),
        *(*strides(x), *strides(dt), *strides(b), *strides(c)),
        stride(out, 0),
        page_bytes // VECTOR_BYTES,
        len(pages),
        D_DIM=d_dim,
        N_DIM=n_dim,
        LANES=tile.lanes,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        num_warps=tile.num_warps,
        **dependent_launch(early),
    )
