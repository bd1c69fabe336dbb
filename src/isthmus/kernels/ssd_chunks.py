"""State space duality over the tokens of a step, many of each sequence, on states where they lie.

A program has some rows of one head's matrix `[P, N]` and walks through a sequence, a chunk of tokens at a time: what
the chunk's tokens read of each other, what they read of the state before, and what they leave in it. The state stays
in registers from the first chunk to the last; nothing else is kept. Rows concern each other in nothing.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.device import shared_bytes
from isthmus.kernels.ssd_decode import softplus, strides
from isthmus.kernels.views import VECTOR_BYTES, stride


class Tile(NamedTuple):
    """How the kernel is built."""

    tokens: int  # of a chunk
    rows: int  # of a state per program
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, n_dim: int, room: int) -> Tile:
    """The build for activations of a dtype: all but bf16 become fp32, whose products take more registers.

    room: bytes of shared memory, see `isthmus.kernels.device.shared_bytes`.
    """
    if dtype != torch.bfloat16:
        return Tile(16, 32, 8, 1)
    # Of 64 rows: two blocks of keys and queries, the states' products, and what becomes of scores.
    rows = 64 if 640 * triton.next_power_of_2(n_dim) + 8192 <= room else 32
    return Tile(64, rows, 4 if n_dim <= 128 else 8, 2)


@triton.jit
def _rows(
    p_rows: tl.tensor, o_row: tl.tensor, o_column: tl.tensor, live: tl.tensor, real: tl.tensor, WIDE: tl.constexpr
) -> tl.tensor:
    b_rows = tl.load(p_rows + o_row[:, None] + o_column[None, :], mask=live[:, None] & real[None, :], other=0.0)
    return b_rows.to(tl.float32) if WIDE else b_rows


@triton.jit
def _sizes(
    p_dt: tl.tensor, o_dt: tl.tensor, bias: tl.tensor, least: tl.float32, most: tl.float32, live: tl.tensor
) -> tl.tensor:
    """Of the tokens' steps; nothing of padding. What is NaN stays NaN."""
    b_size = softplus(tl.load(p_dt + o_dt, mask=live, other=0.0).to(tl.float32) + bias)
    b_size = tl.where(b_size < least, least, tl.where(b_size > most, most, b_size))
    return tl.where(live, b_size, 0.0)


@triton.jit
def _differences(b_sum: tl.tensor) -> tl.tensor:
    """Of fp64 numbers, in fp32 `[reader, writer]`; a small one of two large ones, too, to the last digits."""
    b_high = b_sum.to(tl.float32)
    b_low = (b_sum - b_high.to(tl.float64)).to(tl.float32)
    return (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_starts", "p_ends", "p_sequences", "page_vectors"])
def _chunks_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_starts: tl.tensor,
    p_ends: tl.tensor,
    p_sequences: tl.tensor,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    i_head = tl.program_id(1)
    i_sequence = tl.load(p_sequences + tl.program_id(2))
    page = tl.load(p_pages + i_sequence).to(tl.int64)
    fresh = tl.load(p_fresh + i_sequence).to(tl.int32)
    start = tl.load(p_starts + i_sequence).to(tl.int64)
    behind = tl.load(p_ends + i_sequence).to(tl.int64) + 1
    o_value = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_key = tl.arange(0, BLOCK_N)
    live_value, live_key = o_value < P_DIM, o_key < N_DIM
    # The factor VECTOR tells the compiler how wide it may load.
    p_own = p_state + page * page_vectors * VECTOR + i_head * (P_DIM * N_DIM)
    p_own = p_own + o_value[:, None] * N_DIM + o_key[None, :]
    known = live_value[:, None] & (o_key < N_DIM * (1 - fresh))[None, :]
    b_state = tl.load(p_own, mask=known, other=0.0).to(tl.float32)
    p_query += i_head // GROUP * query_head
    p_key += i_head // GROUP * key_head
    p_value += i_head * value_head
    rate = tl.load(p_rate + i_head).to(tl.float32)
    if STEPPED:
        bias = tl.load(p_dt_bias + i_head).to(tl.float32)
        skip = tl.load(p_skip + i_head).to(tl.float32)
    o_time = tl.arange(0, BLOCK_T)
    for first in range(start, behind, BLOCK_T):
        o_token = first + o_time.to(tl.int64)
        live = o_token < behind
        b_query = _rows(p_query, o_token * query_token, o_key, live, live_key, WIDE)
        b_key = _rows(p_key, o_token * key_token, o_key, live, live_key, WIDE)
        b_value = _rows(p_value, o_token * value_token, o_value, live, live_value, WIDE)
        if STEPPED:
            b_size = _sizes(p_dt, o_token * dt_token + i_head, bias, least, most, live)
            b_decay = (rate * b_size).to(tl.float64)
        else:
            b_size = tl.where(live, 1.0, 0.0)
            b_decay = (-rate * b_size).to(tl.float64)
        b_faded = tl.cumsum(b_decay, 0)
        whole = tl.sum(b_decay, 0)
        b_since = _differences(b_faded)
        b_fade = tl.exp(tl.where(o_time[:, None] < o_time[None, :], float("-inf"), b_since)) * b_size[None, :]
        b_pairs = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * b_fade
        b_out = tl.dot(b_query, tl.trans(b_state).to(b_query.dtype), input_precision=PRECISION)
        b_out *= tl.exp(b_faded.to(tl.float32))[:, None]
        b_out += tl.dot(b_pairs.to(b_value.dtype), b_value, input_precision=PRECISION)
        b_until = tl.exp((whole - b_faded).to(tl.float32)) * b_size
        b_entering = (b_value.to(tl.float32) * b_until[:, None]).to(b_value.dtype)
        b_state = b_state * tl.exp(whole.to(tl.float32)) + tl.dot(
            tl.trans(b_entering), b_key, input_precision=PRECISION
        )
        if STEPPED:
            b_out += skip * b_value.to(tl.float32)
        p_row = p_out + (o_token * out_token)[:, None] + i_head * P_DIM + o_value[None, :]
        tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=live[:, None] & live_value[None, :])
    if page != 0:
        tl.store(p_own, b_state.to(p_state.dtype.element_ty), mask=live_value[:, None] & live_key[None, :])


def ssd_chunks(
    view: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
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
    tile: Tile | None = None,
) -> None:
    """`isthmus.kernels.ssd.ssd` of M sequences of any number of tokens; the skip is added in fp32, too.

    bf16 is multiplied as it is, fp32 in fp32, fp16 (which states would leave) in TF32; all sums are fp32.

    Args:
        view: `[pages, H, P, N]` over the arena, changed in place.
        where: pages `[S]` of the step's sequences, 0: padding, of which nothing is kept; fresh `[S]`; each one's first
            token `[S]` and last `[S]` in the flat batch; which of the S are meant `[M]`.
        query, key: `[T, G, N]`, unit last stride, as value has.
        value: `[T, H, P]`.
        dt: `[T, H]`, unit last stride.
        dt_bias, rate, skip: `[H]`, contiguous.
        out: `[T, H, P]`, heads of a token contiguous, written at those sequences' tokens.
    """
    assert dt_bias.is_contiguous(), "numbers of heads lie together"
    assert skip.is_contiguous(), "numbers of heads lie together"
    assert dt.stride(1) == 1 or dt.shape[1] == 1, "heads of a token are contiguous"
    _chunks(view, where, (query, key, value, out), rate, (dt, dt_bias, skip), limit, tile)


def lightning_chunks(
    view: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slope: Tensor,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """`isthmus.kernels.lightning.lightning_attention`, as `ssd_chunks`. slope: `[H]`, contiguous."""
    _chunks(view, where, (query, key, value, out), slope, (value, value, value), (0.0, 0.0), tile, stepped=False)


def _chunks(
    view: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    rate: Tensor,
    steps: tuple[Tensor, Tensor, Tensor],
    limit: tuple[float, float],
    tile: Tile | None,
    *,
    stepped: bool = True,
) -> None:
    pages, fresh, starts, ends, sequences = where
    query, key, value, out = rows
    dt, dt_bias, skip = steps
    _, heads, p_dim, n_dim = view.shape
    assert rate.is_contiguous(), "numbers of heads lie together"
    assert out[0].is_contiguous(), "heads of a token are contiguous"
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    if len(sequences) == 0:
        return
    tokens, most_rows, num_warps, num_stages = tile or tile_for(value.dtype, n_dim, shared_bytes())
    block_p = max(16, min(most_rows, triton.next_power_of_2(p_dim)))
    block_n = max(16, triton.next_power_of_2(n_dim))
    _chunks_kernel[(triton.cdiv(p_dim, block_p), heads, len(sequences))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        starts,
        ends,
        sequences,
        query,
        key,
        value,
        out,
        rate,
        dt,
        dt_bias,
        skip,
        *limit,
        *(*strides(query), *strides(key), *strides(value)),
        stride(out, 0),
        stride(dt, 0),
        page_bytes // VECTOR_BYTES,
        GROUP=heads // key.shape[1],
        P_DIM=p_dim,
        N_DIM=n_dim,
        STEPPED=stepped,
        VECTOR=VECTOR_BYTES // view.itemsize,
        WIDE=value.dtype != torch.bfloat16,
        PRECISION="tf32" if value.dtype == torch.float16 else "ieee",
        BLOCK_T=tokens,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
