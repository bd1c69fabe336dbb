"""One token per sequence of the gated delta rule, on states where they lie: each is read once and written once.

A program has some columns of one head's state. Fading, what the state has for the key, and the write concern every
column by itself, so programs share nothing.

What the new state has for the query is what the old one has, and the write as often as the key is in the query. So both
products are of the state as it was loaded, whose loads are on their way before anything is waited for; the lengths
of query and key divide the products.
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
from isthmus.kernels.gated_delta import UNIT
from isthmus.kernels.views import VECTOR_BYTES, stride


class Tile(NamedTuple):
    """How the kernel is built."""

    columns: int  # of a state per program
    num_warps: int


TILE = Tile(64, 2)
"""Rows of two lines of a cache, and many bytes on their way per thread: the fastest of ten on an H200 (64 to 256
sequences of 16 heads of 128 x 128); one sequence alone takes 1 microsecond longer than with 32 columns."""


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_tokens", "page_vectors"])
def _delta_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_tokens: tl.tensor,
    p_query: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_decay: tl.tensor,
    p_beta: tl.tensor,
    p_out: tl.tensor,
    scaling: tl.float32,
    query_token: tl.int64,
    key_token: tl.int64,
    value_token: tl.int64,
    decay_token: tl.int64,
    beta_token: tl.int64,
    out_token: tl.int64,
    page_vectors: tl.int32,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_column = tl.program_id(0)
    i_head = tl.program_id(1)
    i_lane = tl.program_id(2)
    page = tl.load(p_pages + i_lane).to(tl.int64)
    fresh = tl.load(p_fresh + i_lane).to(tl.int32)
    token = tl.load(p_tokens + i_lane).to(tl.int64)
    o_value = i_column * BLOCK_V + tl.arange(0, BLOCK_V)
    live_value = o_value < V_DIM
    p_row = p_out + token * out_token + i_head * V_DIM + o_value
    o_key = tl.arange(0, BLOCK_K)
    live_key = o_key < K_DIM
    # The factor VECTOR tells the compiler how wide it may load.
    p_own = p_state + page * page_vectors * VECTOR + i_head * (K_DIM * V_DIM)
    p_own = p_own + o_key[:, None] * V_DIM + o_value[None, :]
    known = live_key[:, None] & (o_value < tl.where(page != 0, V_DIM * (1 - fresh), 0))[None, :]
    b_state = tl.load(p_own, mask=known, other=0.0)
    wait_for_previous(DEPENDENT)
    if page != 0:
        o_row = i_head // GROUP * K_DIM + o_key
        b_query = tl.load(p_query + token * query_token + o_row, mask=live_key, other=0.0)
        b_key = tl.load(p_key + token * key_token + o_row, mask=live_key, other=0.0)
        b_value = tl.load(p_value + token * value_token + i_head * V_DIM + o_value, mask=live_value, other=0.0)
        beta = tl.load(p_beta + token * beta_token + i_head).to(tl.float32)
        p_fade = p_decay + token * decay_token
        if CHANNELS > 1:
            b_fade = tl.exp(tl.load(p_fade + i_head * K_DIM + o_key, mask=live_key, other=0.0).to(tl.float32))[:, None]
        else:
            b_fade = tl.exp(tl.load(p_fade + i_head).to(tl.float32))
        b_query, b_key = b_query.to(tl.float32), b_key.to(tl.float32)
        key_unit = tl.rsqrt(tl.sum(b_key * b_key, 0) + UNIT)
        query_unit = tl.rsqrt(tl.sum(b_query * b_query, 0) + UNIT) * scaling
        both = tl.sum(b_query * b_key, 0)
        b_state *= b_fade
        b_has = tl.sum(b_key[:, None] * b_state, 0)
        b_reads = tl.sum(b_query[:, None] * b_state, 0)
        b_write = (b_value.to(tl.float32) - b_has * key_unit) * (beta * key_unit)
        b_state += b_key[:, None] * b_write[None, :]
        tl.store(p_own, b_state, mask=live_key[:, None] & live_value[None, :])
        b_out = (b_reads + both * b_write) * query_unit
        tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=live_value)
    else:
        tl.store(p_row, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=live_value)


def gated_delta_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    out: Tensor,
    *,
    tile: Tile = TILE,
    early: bool,
) -> None:
    """`gated_delta_rule`, or with decay `[T, heads, K]` `kimi_delta_rule`, of n sequences with one token each.

    Args:
        view: fp32 `[pages, heads, K, V]` over the arena, changed in place.
        pages: `[n]`, physical; a lane with page 0 is padding, whose output is zero.
        fresh: `[n]`, not zero where the state is zero, whatever the page holds.
        tokens: `[n]`, of the flat batch.
        query, key: `[T, key heads, K]`, heads of a token contiguous, as in all that follow.
        value: `[T, heads, V]`.
        decay: `[T, heads]` or `[T, heads, K]`.
        beta: `[T, heads]`.
        out: `[T, heads, V]`, written at `tokens`.
        early: it may begin before the kernel before it has ended, and pages, fresh, tokens and states are read then
            (`isthmus.kernels.dependent`): between what writes them and this lies an ordinary launch.
    """
    _, heads, k_dim, v_dim = view.shape
    assert view.dtype == torch.float32, "states are fp32"
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    block_v = min(tile.columns, triton.next_power_of_2(v_dim))
    if len(pages) == 0:
        return
    _delta_kernel[(triton.cdiv(v_dim, block_v), heads, len(pages))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        tokens,
        query,
        key,
        value,
        decay,
        beta,
        out,
        k_dim**-0.5,
        *(_token_stride(x) for x in (query, key, value, decay, beta, out)),
        page_bytes // VECTOR_BYTES,
        GROUP=heads // key.shape[1],
        K_DIM=k_dim,
        V_DIM=v_dim,
        CHANNELS=k_dim if decay.dim() == 3 else 1,
        VECTOR=VECTOR_BYTES // view.itemsize,
        UNIT=UNIT,
        BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_V=block_v,
        num_warps=tile.num_warps,
        **dependent_launch(early),
    )


def _token_stride(x: Tensor) -> int:
    assert x[0].is_contiguous(), "heads of a token are contiguous"
    return stride(x, 0)
