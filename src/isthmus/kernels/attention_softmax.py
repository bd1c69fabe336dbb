"""What both attention kernels share: where cached rows lie, scores, the online softmax, and its end.

Everything is in base two: scores are multiplied by log2(e) once, so that a weight is one `exp2`. A row is carried as
(maximum, sum, weighted rows), as in Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def look_up(
    p_table: tl.tensor,
    start: tl.int32,
    first: tl.int32,
    end: tl.int32,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Pages of cached tokens [start, start + BLOCK_N), only of those in [first, end): one if the block lies in one.

    `p_table` is the sequence's row of the page table and `start` a multiple of BLOCK_N, no more than BLOCK_N before
    `first`. Loops ask for the pages of the block after the next load, so that no load waits for another.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        b_page = tl.load(p_table + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        o_token = start + tl.arange(0, BLOCK_N)
        b_page = tl.load(p_table + o_token // PAGE_SIZE, mask=(o_token >= first) & (o_token < end), other=0)
    return b_page


@triton.jit
def widen(b_rows: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Rows of pages as DTYPE, exactly. From fp8 by two conversions that a GPU does at full speed: its one from fp8
    to bfloat16 would be slower than the memory.
    """
    if b_rows.dtype.is_fp8():
        b_rows = b_rows.to(tl.float16).to(tl.float32)
    return b_rows.to(DTYPE)


@triton.jit
def scores(
    b_score: tl.tensor,
    visible: tl.tensor,
    scaling: tl.float32,
    softcap: tl.float32,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Scores of products `[M, N]` of queries and keys in base two, -inf where not `visible`."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), which is right at both infinities.
        b_score = (softcap * LOG2E) * (1 - 2 / (1 + tl.exp2(b_score * (scaling * 2 * LOG2E / softcap))))
    else:
        b_score = b_score * (scaling * LOG2E)
    return tl.where(visible, b_score, float("-inf"))


@triton.jit
def relative_scores(p_row: tl.tensor, b_distance: tl.tensor, inside: tl.tensor, DISTANCES: tl.constexpr) -> tl.tensor:
    """What distances add to scores, in base two: `p_row` has a row of so many for each query, nothing is farther."""
    known = inside & (b_distance >= 0) & (b_distance < DISTANCES)
    return tl.load(p_row + b_distance, mask=known, other=0.0).to(tl.float32) * LOG2E


@triton.jit
def add_block(
    b_score: tl.tensor,
    b_value: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    NEVER_EMPTY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Take a block of scores `[M, N]` and value rows `[N, V]` into a row's (maximum, sum, weighted rows).

    NEVER_EMPTY promises that every row has seen a token by now; without it a row of -inf stays what it was.
    """
    b_new = tl.maximum(b_max, tl.max(b_score, 1))
    b_shift = b_new if NEVER_EMPTY else tl.where(b_new == float("-inf"), 0.0, b_new)
    b_weight = tl.exp2(b_score - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    b_out = tl.dot(b_weight.to(b_value.dtype), b_value, b_out * b_decay[:, None], input_precision=PRECISION)
    return b_new, b_sum, b_out


@triton.jit
def finish(
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    p_sinks: tl.tensor,
    o_head: tl.tensor,
    live: tl.tensor,
    v_scale: tl.float32,
    SINKS: tl.constexpr,
) -> tl.tensor:
    """The weighted mean of the value rows; 0 for a row that saw nothing. A sink takes part in the sum only."""
    if SINKS:
        b_sink = tl.load(p_sinks + o_head, mask=live, other=0.0).to(tl.float32) * LOG2E
        b_new = tl.maximum(b_max, b_sink)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + tl.exp2(b_sink - b_new)
        b_out = b_out * b_decay[:, None]
    return b_out * (v_scale / tl.where(b_sum == 0, 1.0, b_sum))[:, None]
