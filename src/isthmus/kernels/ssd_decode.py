"""One token per sequence of state space duality, on states where they lie: each is read once and written once.

A program has some rows of one head's matrix `[P, N]`. A row belongs to one element of the value, and concerns no other
row: programs share nothing.
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

    elements: int  # of a state per program
    num_warps: int


TILE = Tile(2048, 1)
"""A warp by itself waits for no other: the fastest of nine on an H200 (128 heads of 64 x 128), by 2 %."""

STRAIGHT = tl.constexpr(20.0)
"""Above it softplus is its argument, as in torch."""


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """`log(1 + exp(x))` of fp32 numbers.

    The sum `1 + e` is rounded, which matters where e is small; `e / (1 + e - 1)` says by how much (Kahan's log1p, in
    Goldberg, What Every Computer Scientist Should Know About Floating-Point Arithmetic, 1991, theorem 4).
    """
    e = tl.exp(tl.where(x > STRAIGHT, 0.0, x))
    one_more = 1.0 + e
    lost = one_more == 1.0
    curved = tl.log(one_more) * (e / tl.where(lost, 1.0, one_more - 1.0))
    return tl.where(x > STRAIGHT, x, tl.where(lost, e, curved))


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_tokens", "page_vectors"])
def _ssd_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_tokens: tl.tensor,
    p_query: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_out: tl.tensor,
    p_rate: tl.tensor,
    p_dt: tl.tensor,
    p_dt_bias: tl.tensor,
    p_skip: tl.tensor,
    least: tl.float32,
    most: tl.float32,
    query_token: tl.int64,
    query_head: tl.int64,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    out_token: tl.int64,
    dt_token: tl.int64,
    page_vectors: tl.int32,
    GROUP: tl.constexpr,
    P_DIM: tl.constexpr,
    N_DIM: tl.constexpr,
    STEPPED: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_row = tl.program_id(0)
    i_head = tl.program_id(1)
    i_lane = tl.program_id(2)
    page = tl.load(p_pages + i_lane).to(tl.int64)
    fresh = tl.load(p_fresh + i_lane).to(tl.int32)
    token = tl.load(p_tokens + i_lane).to(tl.int64)
    o_value = i_row * BLOCK_P + tl.arange(0, BLOCK_P)
    live_value = o_value < P_DIM
    p_row = p_out + token * out_token + i_head * P_DIM + o_value
    o_key = tl.arange(0, BLOCK_N)
    live_key = o_key < N_DIM
    # The factor VECTOR tells the compiler how wide it may load.
    p_own = p_state + page * page_vectors * VECTOR + i_head * (P_DIM * N_DIM)
    p_own = p_own + o_value[:, None] * N_DIM + o_key[None, :]
    known = live_value[:, None] & (o_key < tl.where(page != 0, N_DIM * (1 - fresh), 0))[None, :]
    b_state = tl.load(p_own, mask=known, other=0.0)
    wait_for_previous(DEPENDENT)
    if page != 0:
        i_group = i_head // GROUP
        b_query = tl.load(p_query + token * query_token + i_group * query_head + o_key, mask=live_key, other=0.0)
        b_key = tl.load(p_key + token * key_token + i_group * key_head + o_key, mask=live_key, other=0.0)
        b_value = tl.load(p_value + token * value_token + i_head * value_head + o_value, mask=live_value, other=0.0)
        b_value = b_value.to(tl.float32)
        rate = tl.load(p_rate + i_head).to(tl.float32)
        if STEPPED:
            dt = tl.load(p_dt + token * dt_token + i_head).to(tl.float32)
            size = softplus(dt + tl.load(p_dt_bias + i_head).to(tl.float32))
            size = tl.where(size < least, least, tl.where(size > most, most, size))  # what is NaN stays NaN
            b_entering = b_value * size
            decay = rate * size
        else:
            b_entering = b_value
            decay = -rate
        b_state = b_state.to(tl.float32) * tl.exp(decay)
        b_state += b_entering[:, None] * b_key.to(tl.float32)[None, :]
        tl.store(p_own, b_state.to(p_state.dtype.element_ty), mask=live_value[:, None] & live_key[None, :])
        b_out = tl.sum(b_state * b_query.to(tl.float32)[None, :], 1)
        if STEPPED:
            b_out += tl.load(p_skip + i_head).to(tl.float32) * b_value
        tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=live_value)
    else:
        tl.store(p_row, tl.zeros([BLOCK_P], p_out.dtype.element_ty), mask=live_value)


def ssd_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    skip: Tensor,
    out: Tensor,
    *,
    limit: tuple[float, float] = (0.0, float("inf")),
    tile: Tile = TILE,
    early: bool,
) -> None:
    """`isthmus.kernels.ssd.ssd` of n sequences with one token each; the skip is added in fp32, too.

    Args:
        view: `[pages, H, P, N]` over the arena, changed in place.
        pages, fresh, tokens, early: as in `isthmus.kernels.gated_delta_decode.gated_delta_decode`.
        query, key: `[T, G, N]`, unit last stride, as value has.
        value: `[T, H, P]`.
        dt: `[T, H]`, unit last stride.
        dt_bias, rate, skip: `[H]`, contiguous.
        out: `[T, H, P]`, heads of a token contiguous, written at `tokens`.
    """
    assert dt_bias.is_contiguous(), "numbers of heads lie together"
    assert skip.is_contiguous(), "numbers of heads lie together"
    assert dt.stride(1) == 1 or dt.shape[1] == 1, "heads of a token are contiguous"
    _decode(view, (pages, fresh, tokens), (query, key, value, out), rate, (dt, dt_bias, skip), limit, tile, early)


def lightning_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slope: Tensor,
    out: Tensor,
    *,
    tile: Tile = TILE,
    early: bool,
) -> None:
    """`isthmus.kernels.lightning.lightning_attention` of n sequences with one token each.

    Args:
        view: `[pages, H, V, K]` over the arena, changed in place.
        query, key: `[T, H, K]`.
        value: `[T, H, V]`.
        slope: `[H]`, contiguous.
        out: `[T, H, V]`.

    All else is as in `ssd_decode`.
    """
    _decode(view, (pages, fresh, tokens), (query, key, value, out), slope, None, (0.0, 0.0), tile, early)


def _decode(
    view: Tensor,
    lanes: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    rate: Tensor,
    stepped: tuple[Tensor, Tensor, Tensor] | None,
    limit: tuple[float, float],
    tile: Tile,
    early: bool,
) -> None:
    """lanes: pages, fresh, tokens; rows: query, key, value, out; stepped: dt, dt_bias, skip."""
    _, heads, p_dim, n_dim = view.shape
    (pages, fresh, tokens), (query, key, value, out) = lanes, rows
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    assert rate.is_contiguous(), "numbers of heads lie together"
    assert out[0].is_contiguous(), "heads of a token are contiguous"
    dt, dt_bias, skip = (rate, rate, rate) if stepped is None else stepped
    block_n = triton.next_power_of_2(n_dim)
    block_p = min(max(1, tile.elements // block_n), triton.next_power_of_2(p_dim))
    if len(pages) == 0:
        return
    _ssd_kernel[(triton.cdiv(p_dim, block_p), heads, len(pages))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        tokens,
        *(*rows, rate, dt, dt_bias, skip),
        *limit,
        *(*strides(query), *strides(key), *strides(value)),
        stride(out, 0),
        stride(dt, 0),
        page_bytes // VECTOR_BYTES,
        GROUP=heads // key.shape[1],
        P_DIM=p_dim,
        N_DIM=n_dim,
        STEPPED=stepped is not None,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=tile.num_warps,
        **dependent_launch(early),
    )


def strides(x: Tensor) -> tuple[int, int]:
    """How far tokens and their heads lie apart in `[T, heads, elements]`, whose elements lie together."""
    assert stride(x, 2) == 1 or x.shape[2] == 1, "elements of a head are contiguous"
    return stride(x, 0), stride(x, 1)
