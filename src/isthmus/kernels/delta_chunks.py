"""The delta rules over the tokens of a step, many of each sequence, on states where they lie.

The step's tokens are cut at multiples of 64, wherever its sequences begin: what a sequence has of such a block is a
piece. Two launches:

    solve     by piece and head: the triangular system that says what each token writes, once as if the state before the
              piece were zero (`written`) and once by how much that state changes it (`known`)
    walk      by sequence, head and some columns of the state: from piece to piece, with the state in registers

The first knows nothing of states, so that all pieces are computed side by side; the second is products alone. With the
state S `[K, V]` before a piece, by its tokens:

    w = written - known S
    outputs = reads S + seen w
    S' = fades S + keeps' w

reads and keeps are its queries and keys with what fades before and after them, seen what its tokens see of each other.
There are as many programs for pieces as blocks and sequences together: one for the piece that a block begins with, and
one for the first piece of each sequence, which is nothing where that is the block's.

The system is that of `isthmus.kernels.gated_delta`. Two things need care; both are done by halves of a block, halves of
these, and so on. Its inverse: of two blocks on the diagonal with N below them it is D - D N D, where D has their own.
And decays of every number of a key: a token of a second half sees one of the first half through the border between
them, so that both factors, how much the one has faded until there and how much all does from there to the other, are at
most one. Their exponents are sums over tokens, computed as products with a matrix of zeros and ones.
"""
# ruff: noqa: N803, PLR0915 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.device import shared_bytes
from isthmus.kernels.gated_delta import UNIT
from isthmus.kernels.views import VECTOR_BYTES, stride

BLOCK = 64
"""Tokens of a block."""

LEVELS = tl.constexpr(BLOCK.bit_length() - 1)
"""How often a block is halved until a token is left."""

LEAST = tl.constexpr(-40.0)
"""Of a decay. e^-40 is 4e-18, and sums of 64 of these leave differences of fp32 four digits."""

_WARPS = 4  # more were slower, for either launch

_ROW_BYTES = 128
"""What a tile has of a key or a value. Narrower ones are other instructions on Hopper, and ptxas 12.8, which comes with
Triton 3.6, was seen to take the addresses of their second parts from a register of something else."""


def walk_stages(k_dim: int, itemsize: int, room: int) -> int:
    """How many pieces' rows a walk has in flight. room: bytes of shared memory, see `shared_bytes`."""
    if itemsize > 2:
        return 1
    stage = 2 * BLOCK * (3 * triton.next_power_of_2(k_dim) + BLOCK + _ROW_BYTES // 2)
    return max(1, min(3, int((room - 32 * 1024) // stage)))


@triton.jit
def _rows(p_rows: tl.tensor, o_row: tl.tensor, o_column: tl.tensor, live: tl.tensor, real: tl.tensor) -> tl.tensor:
    """In fp32."""
    inside = live[:, None] & real[None, :]
    return tl.load(p_rows + o_row[:, None] + o_column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _length(
    p_rows: tl.tensor, o_row: tl.tensor, live: tl.tensor, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """One over that of each row, as `isthmus.kernels.gated_delta` has it."""
    b_square = tl.zeros_like(o_row).to(tl.float32)
    for first in tl.range(0, DIM, BLOCK, num_stages=1):
        o_column = first + tl.arange(0, BLOCK)
        b_rows = _rows(p_rows, o_row, o_column, live, o_column < DIM)
        b_square += tl.sum(b_rows * b_rows, 1)
    return tl.rsqrt(b_square + UNIT)


@triton.jit
def _wide(b_rows: tl.tensor) -> tl.tensor:
    """Nothing is computed in bf16 but products."""
    return b_rows.to(tl.float32)


@triton.jit
def _bounded(b_decay: tl.tensor) -> tl.tensor:
    """Greater ones would take the digits of all later sums. NaN stays NaN."""
    return tl.where(b_decay < LEAST, LEAST, b_decay)


@triton.jit
def _fading(b_since: tl.tensor) -> tl.tensor:
    """Of an exponent that is never positive where it counts."""
    return tl.exp(tl.minimum(b_since, 0.0))


@triton.jit
def _across(o_half: tl.tensor) -> tl.tensor:
    """Pairs `[T, T]` of tokens of a second half with tokens of its first half; o_half: each token's."""
    return (o_half[:, None] == o_half[None, :] + 1) & (o_half % 2 == 1)[:, None]


@triton.jit
def _halves(b_decay: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two numbers of DTYPE whose sum is one of fp32, but for what changes no exponential by more than 3e-6."""
    b_high = b_decay.to(DTYPE)
    return b_high, (b_decay - b_high.to(tl.float32)).to(DTYPE)


@triton.jit
def _sums(
    which: tl.tensor, b_high: tl.tensor, b_low: tl.tensor, DTYPE: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """`[T, K]`: for each token, of the tokens `which` `[T, T]` names."""
    b_which = tl.where(which, 1.0, 0.0).to(DTYPE)
    b_sums = tl.dot(b_which, b_high, input_precision=PRECISION)
    return b_sums if DTYPE.is_fp32() else tl.dot(b_which, b_low, b_sums, input_precision=PRECISION)


@triton.jit
def _inverse(b_pairs: tl.tensor, o_time: tl.tensor, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr) -> tl.tensor:
    """Of `1 + b_pairs`, `[T, T]` and zero on and above the diagonal."""
    b_found = (o_time[:, None] == o_time[None, :]).to(tl.float32) - tl.where(_across(o_time), b_pairs, 0.0)
    for level in tl.static_range(1, LEVELS):
        b_below = tl.where(_across(o_time >> level), b_pairs, 0.0)
        b_below = tl.dot(b_below, b_found, input_precision=PRECISION)
        b_found -= tl.dot(b_found, b_below, input_precision=PRECISION)
    return b_found


@triton.jit
def _piece(
    i_piece: tl.tensor,
    blocks: tl.tensor,
    p_pages: tl.tensor,
    p_owner: tl.tensor,
    p_starts: tl.tensor,
    p_ends: tl.tensor,
    p_sequences: tl.tensor,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """First token of its block, its own first and last one, and the page of its state; 0: there is no such piece."""
    if i_piece < blocks:  # what a block begins with
        i_sequence = tl.load(p_owner + i_piece.to(tl.int64) * BLOCK_T)
        begin, end = tl.load(p_starts + i_sequence).to(tl.int64), tl.load(p_ends + i_sequence).to(tl.int64)
        first = i_piece.to(tl.int64) * BLOCK_T
        start, nothing = first, begin == end  # one token alone is not ours
    else:  # what a sequence begins with
        i_sequence = tl.load(p_sequences + i_piece - blocks)
        start, end = tl.load(p_starts + i_sequence).to(tl.int64), tl.load(p_ends + i_sequence).to(tl.int64)
        first = start // BLOCK_T * BLOCK_T
        nothing = start == first
    page = tl.where(nothing, 0, tl.load(p_pages + i_sequence))
    return first, start, tl.minimum(end, first + BLOCK_T - 1), page


@triton.jit(do_not_specialize=["p_pages", "p_owner", "p_starts", "p_ends", "p_sequences", "blocks"])
def _solve_kernel(
    p_query: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_decay: tl.tensor,
    p_beta: tl.tensor,
    p_pages: tl.tensor,
    p_owner: tl.tensor,
    p_starts: tl.tensor,
    p_ends: tl.tensor,
    p_sequences: tl.tensor,
    p_written: tl.tensor,
    p_known: tl.tensor,
    p_reads: tl.tensor,
    p_keeps: tl.tensor,
    p_seen: tl.tensor,
    p_fades: tl.tensor,
    scaling: tl.float32,
    blocks: tl.int32,
    query_token: tl.int64,
    key_token: tl.int64,
    value_token: tl.int64,
    decay_token: tl.int64,
    beta_token: tl.int64,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    i_head, i_piece = tl.program_id(0), tl.program_id(1)
    first, start, end, page = _piece(i_piece, blocks, p_pages, p_owner, p_starts, p_ends, p_sequences, BLOCK_T)
    if page == 0:
        return
    o_time = tl.arange(0, BLOCK_T)
    o_token = first + o_time.to(tl.int64)
    live = (o_token >= start) & (o_token <= end)
    p_query += i_head // GROUP * K_DIM
    p_key += i_head // GROUP * K_DIM
    b_query_unit = _length(p_query, o_token * query_token, live, UNIT, K_DIM, BLOCK_K)
    b_key_unit = _length(p_key, o_token * key_token, live, UNIT, K_DIM, BLOCK_K)
    b_beta = tl.load(p_beta + o_token * beta_token + i_head, mask=live, other=0.0).to(tl.float32)
    p_fade = p_fades + (i_piece.to(tl.int64) * HEADS + i_head) * CHANNELS
    p_decay += i_head * CHANNELS
    # What tokens see of each other, and write over each other; rows for the walk.
    b_seen = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    b_pairs = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for at in tl.range(0, K_DIM, BLOCK_K, num_stages=1):
        o_key = at + tl.arange(0, BLOCK_K)
        real = o_key < K_DIM
        b_query = _rows(p_query, o_token * query_token, o_key, live, real) * b_query_unit[:, None]
        b_key = _rows(p_key, o_token * key_token, o_key, live, real) * b_key_unit[:, None]
        b_query, b_key = b_query.to(DTYPE), b_key.to(DTYPE)
        if CHANNELS > 1:
            b_decay = _bounded(_rows(p_decay, o_token * decay_token, o_key, live, real))
            b_high, b_low = _halves(b_decay, DTYPE)
            b_seen += tl.where(
                o_time[:, None] == o_time[None, :], tl.sum(_wide(b_query) * _wide(b_key), 1)[:, None], 0.0
            )
            for level in tl.range(LEVELS, num_stages=1):
                o_half = o_time >> level
                # To where a first half ends and a second one begins: from a token of one, or to one of the other.
                passed = (o_time[:, None] >= o_time[None, :]) == (o_half % 2 == 1)[:, None]
                near = o_half[:, None] == o_half[None, :]
                b_fade = tl.exp(_sums(near & passed, b_high, b_low, DTYPE, PRECISION))
                b_faded = (_wide(b_key) * b_fade).to(DTYPE)
                b_other, across = tl.trans(b_faded), _across(o_half)
                b_reads = tl.dot((_wide(b_query) * b_fade).to(DTYPE), b_other, input_precision=PRECISION)
                b_seen += tl.where(across, b_reads, 0.0)
                b_writes = tl.dot(b_faded, b_other, input_precision=PRECISION)
                b_pairs += tl.where(across, b_writes, 0.0)
            b_since = tl.exp(_sums(o_time[:, None] >= o_time[None, :], b_high, b_low, DTYPE, PRECISION))
            b_until = tl.exp(_sums(o_time[:, None] < o_time[None, :], b_high, b_low, DTYPE, PRECISION))
            tl.store(p_fade + o_key, tl.exp(tl.sum(b_decay, 0)), mask=real)
        else:
            b_decay = _bounded(tl.load(p_decay + o_token * decay_token, mask=live, other=0.0).to(tl.float32))
            b_sums, b_whole = tl.cumsum(b_decay, 0)[:, None], tl.sum(b_decay, 0)
            b_since, b_until = tl.exp(b_sums), _fading(b_whole - b_sums)
            b_seen = tl.dot(b_query, tl.trans(b_key), b_seen, input_precision=PRECISION)
            b_pairs = tl.dot(b_key, tl.trans(b_key), b_pairs, input_precision=PRECISION)
            tl.store(p_fade, tl.exp(b_whole))
        inside = live[:, None] & real[None, :]
        o_rows = (o_token * (HEADS * K_DIM) + i_head * K_DIM)[:, None] + o_key[None, :]
        tl.store(p_reads + o_rows, (_wide(b_query) * b_since * scaling).to(DTYPE), mask=inside)
        tl.store(p_keeps + o_rows, (_wide(b_key) * b_until).to(DTYPE), mask=inside)
    if CHANNELS == 1:
        b_decay = _bounded(tl.load(p_decay + o_token * decay_token, mask=live, other=0.0).to(tl.float32))
        b_sum = tl.cumsum(b_decay, 0)
        b_since = _fading(b_sum[:, None] - b_sum[None, :])
        b_seen, b_pairs = b_seen * b_since, b_pairs * b_since
    b_seen = tl.where(o_time[:, None] >= o_time[None, :], b_seen * scaling, 0.0)
    o_seen = (o_token * (HEADS * BLOCK_T) + i_head * BLOCK_T)[:, None] + o_time[None, :]
    tl.store(p_seen + o_seen, b_seen.to(DTYPE), mask=live[:, None])
    # The system, and what it does to keys and values.
    b_pairs = tl.where(o_time[:, None] > o_time[None, :], b_pairs, 0.0) * b_beta[:, None]
    b_exact = _inverse(b_pairs, o_time, PRECISION, BLOCK_T)
    # By how much a state changes what is written must not be rounded alike for every token of a kind: it would grow.
    b_solved = b_exact.to(DTYPE)
    if not DTYPE.is_fp32():
        b_rest = (b_exact - _wide(b_solved)).to(DTYPE)
    for at in tl.range(0, K_DIM, BLOCK_K, num_stages=1):
        o_key = at + tl.arange(0, BLOCK_K)
        real = o_key < K_DIM
        b_key = (_rows(p_key, o_token * key_token, o_key, live, real) * b_key_unit[:, None]).to(DTYPE)
        if CHANNELS > 1:
            b_high, b_low = _halves(_bounded(_rows(p_decay, o_token * decay_token, o_key, live, real)), DTYPE)
            b_sums = _sums(o_time[:, None] >= o_time[None, :], b_high, b_low, DTYPE, PRECISION)
        else:
            b_decay = _bounded(tl.load(p_decay + o_token * decay_token, mask=live, other=0.0).to(tl.float32))
            b_sums = tl.cumsum(b_decay, 0)[:, None]
        b_key = (_wide(b_key) * tl.exp(b_sums) * b_beta[:, None]).to(DTYPE)
        b_known = tl.dot(b_solved, b_key, input_precision=PRECISION)
        if not DTYPE.is_fp32():
            b_known = tl.dot(b_rest, b_key, b_known, input_precision=PRECISION)
        o_rows = (o_token * (HEADS * K_DIM) + i_head * K_DIM)[:, None] + o_key[None, :]
        tl.store(p_known + o_rows, b_known.to(DTYPE), mask=live[:, None] & real[None, :])
    for at in tl.range(0, V_DIM, BLOCK_V, num_stages=1):
        o_value = at + tl.arange(0, BLOCK_V)
        real = o_value < V_DIM
        b_value = _rows(p_value, o_token * value_token, i_head * V_DIM + o_value, live, real) * b_beta[:, None]
        b_written = tl.dot(b_solved, b_value.to(DTYPE), input_precision=PRECISION)
        o_rows = (o_token * (HEADS * V_DIM) + i_head * V_DIM)[:, None] + o_value[None, :]
        tl.store(p_written + o_rows, b_written.to(DTYPE), mask=live[:, None] & real[None, :])


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_starts", "p_ends", "p_sequences", "blocks", "page_vectors"])
def _walk_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_starts: tl.tensor,
    p_ends: tl.tensor,
    p_sequences: tl.tensor,
    p_written: tl.tensor,
    p_known: tl.tensor,
    p_reads: tl.tensor,
    p_keeps: tl.tensor,
    p_seen: tl.tensor,
    p_fades: tl.tensor,
    p_out: tl.tensor,
    blocks: tl.int32,
    out_token: tl.int64,
    page_vectors: tl.int32,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    i_head = tl.program_id(1)
    i_sequence = tl.load(p_sequences + tl.program_id(2))
    page = tl.load(p_pages + i_sequence).to(tl.int64)
    fresh = tl.load(p_fresh + i_sequence).to(tl.int32)
    start = tl.load(p_starts + i_sequence).to(tl.int64)
    behind = tl.load(p_ends + i_sequence).to(tl.int64) + 1
    o_time, o_key = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    o_value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_key, real_value = o_key < K_DIM, o_value < V_DIM
    # The factor VECTOR tells the compiler how wide it may load.
    p_own = p_state + page * page_vectors * VECTOR + i_head * (K_DIM * V_DIM)
    p_own = p_own + o_key[:, None] * V_DIM + o_value[None, :]
    if page == 0:
        for first in tl.range(start, behind, BLOCK_T):
            o_token = first + o_time.to(tl.int64)
            p_rows = p_out + (o_token * out_token)[:, None] + i_head * V_DIM + o_value[None, :]
            nothing = tl.zeros([BLOCK_T, BLOCK_V], p_out.dtype.element_ty)
            tl.store(p_rows, nothing, mask=(o_token < behind)[:, None] & real_value[None, :])
        return
    known = real_key[:, None] & (o_value < V_DIM * (1 - fresh))[None, :]
    b_state = tl.load(p_own, mask=known, other=0.0)
    dtype = p_written.dtype.element_ty
    for first in tl.range(start // BLOCK_T * BLOCK_T, behind, BLOCK_T, num_stages=STAGES):
        o_token = first + o_time.to(tl.int64)
        live = (o_token >= start) & (o_token < behind)
        inside_key, inside_value = live[:, None] & real_key[None, :], live[:, None] & real_value[None, :]
        piece = tl.where(first < start, blocks + tl.program_id(2), first // BLOCK_T)
        p_fade = p_fades + (piece * HEADS + i_head) * CHANNELS
        b_fade = tl.load(p_fade + o_key, mask=real_key, other=0.0)[:, None] if CHANNELS > 1 else tl.load(p_fade)
        # Rows are asked for one after the other: shared memory need not hold all of them.
        o_keys = (o_token * (HEADS * K_DIM) + i_head * K_DIM)[:, None] + o_key[None, :]
        o_values = (o_token * (HEADS * V_DIM) + i_head * V_DIM)[:, None] + o_value[None, :]
        o_seen = (o_token * (HEADS * BLOCK_T) + i_head * BLOCK_T)[:, None] + o_time[None, :]
        b_before = b_state.to(dtype)
        b_known = tl.load(p_known + o_keys, mask=inside_key, other=0.0)
        b_write = tl.load(p_written + o_values, mask=inside_value, other=0.0).to(tl.float32)
        b_write = (b_write - tl.dot(b_known, b_before, input_precision=PRECISION)).to(dtype)
        b_reads = tl.load(p_reads + o_keys, mask=inside_key, other=0.0)
        b_out = tl.dot(b_reads, b_before, input_precision=PRECISION)
        b_seen = tl.load(p_seen + o_seen, mask=live[:, None], other=0.0)
        b_out = tl.dot(b_seen, b_write, b_out, input_precision=PRECISION)
        b_keeps = tl.load(p_keeps + o_keys, mask=inside_key, other=0.0)
        b_state = tl.dot(tl.trans(b_keeps), b_write, b_state * b_fade, input_precision=PRECISION)
        p_rows = p_out + (o_token * out_token)[:, None] + i_head * V_DIM + o_value[None, :]
        tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=inside_value)
    tl.store(p_own, b_state, mask=real_key[:, None] & real_value[None, :])


def delta_chunks(
    view: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    owner: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    out: Tensor,
) -> None:
    """`gated_delta_rule`, or with decay `[T, heads, K]` `kimi_delta_rule`, of M sequences with several tokens each, and
    of padding.

    Queries and keys are rounded at unit length; products are of bf16 or, of fp32 and of fp16 (whose range states would
    leave), in three parts of TF32; all sums are fp32.

    Args:
        view: fp32 `[pages, heads, K, V]` over the arena, changed in place.
        where: pages `[S]` of the step's sequences, 0: padding, whose outputs are zero; fresh `[S]`; each one's first
            token `[S]` and last `[S]` in the flat batch; which of the S are meant `[M]`.
        owner: `[T]`, the sequence of each token, of the S.
        query, key: `[T, key heads, K]`, heads of a token contiguous, as in all that follow.
        value: `[T, heads, V]`.
        decay: `[T, heads]` or `[T, heads, K]`, logarithms, none positive.
        beta: `[T, heads]`.
        out: `[T, heads, V]`, written at those sequences' tokens.
    """
    pages, fresh, starts, ends, sequences = where
    _, heads, k_dim, v_dim = view.shape
    tokens = len(value)
    assert view.dtype == torch.float32, "states are fp32"
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    assert len(owner) == tokens, "every token is somebody's"
    if len(sequences) == 0:
        return
    dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    columns = _ROW_BYTES // dtype.itemsize
    channels, blocks = k_dim if decay.dim() == 3 else 1, triton.cdiv(tokens, BLOCK)
    pieces = blocks + len(sequences)
    known, reads, keeps = (query.new_empty((tokens, heads, k_dim), dtype=dtype) for _ in range(3))
    written = query.new_empty((tokens, heads, v_dim), dtype=dtype)
    seen = query.new_empty((tokens, heads, BLOCK), dtype=dtype)
    fades = query.new_empty((pieces, heads, channels), dtype=torch.float32)
    block_k = max(columns, triton.next_power_of_2(k_dim))
    precision = "tf32" if dtype == torch.bfloat16 else "tf32x3"
    sizes = {"HEADS": heads, "K_DIM": k_dim, "V_DIM": v_dim, "CHANNELS": channels, "PRECISION": precision}
    _solve_kernel[(heads, pieces)](
        *(query, key, value, decay, beta, pages, owner, starts, ends, sequences),
        *(written, known, reads, keeps, seen, fades),
        k_dim**-0.5,
        blocks,
        *(_token_stride(x) for x in (query, key, value, decay, beta)),
        **sizes,
        GROUP=heads // key.shape[1],
        UNIT=UNIT,
        DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        BLOCK_T=BLOCK,
        BLOCK_K=columns,
        BLOCK_V=columns,
        num_warps=_WARPS,
    )
    _walk_kernel[(triton.cdiv(v_dim, columns), heads, len(sequences))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        *(starts, ends, sequences, written, known, reads, keeps, seen, fades, out),
        blocks,
        _token_stride(out),
        page_bytes // VECTOR_BYTES,
        **sizes,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_T=BLOCK,
        BLOCK_K=block_k,
        BLOCK_V=columns,
        STAGES=walk_stages(k_dim, dtype.itemsize, shared_bytes()),
        num_warps=_WARPS,
    )


def _token_stride(x: Tensor) -> int:
    assert x[0].is_contiguous(), "heads of a token are contiguous"
    return stride(x, 0)
