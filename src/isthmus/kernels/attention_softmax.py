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

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_E4M3 = tl.constexpr("""{
.reg .b32 low, high;
.reg .b16 first, second, none;
prmt.b32 low, $2, 0, 0x4420;
prmt.b32 high, $2, 0, 0x4431;
mov.b32 {first, none}, low;
mov.b32 {second, none}, high;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")

_E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x2404;
prmt.b32 $1, $2, 0, 0x3414;
}""")
"""A number of e5m2 is the upper byte of one of fp16."""


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
def numbers(b_rows: tl.tensor, FP8: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """A tuple: rows of pages as DTYPE, exactly; of words of two FP8 numbers, the first of each, then the second."""
    if FP8 is None:
        return (widen(b_rows, DTYPE),)
    else:
        b_first, b_second = _halves(b_rows, FP8)
        return (b_first.to(DTYPE), b_second.to(DTYPE))


@triton.jit
def _halves(b_words: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    if _INTERPRETED:
        b_first = (b_words & 0xFF).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
        b_second = (b_words >> 8).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    else:
        # The same of two words at a time. The compiler needs twice as many instructions for it, and a GPU runs out of
        # them before it runs out of bandwidth.
        code: tl.constexpr = _E5M2 if tl.float8e5 == FP8 else _E4M3
        b_first, b_second = tl.inline_asm_elementwise(
            code, "=r,=r,r", [b_words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return b_first, b_second


@triton.jit
def level(b_query: tl.tensor, b_rest: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Tuples of parts `[M, K]` of queries, divided by the power of two below each row's largest number, as DTYPE; and
    those powers `[M]`. Numbers below 2^-14 of the largest are rounded to 2^-25 of it: only keys of e5m2 that differ by
    as much could tell."""
    b_most = tl.max(tl.abs(b_query[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(b_query)):
        b_most = tl.maximum(b_most, tl.max(tl.abs(b_query[i].to(tl.float32)), 1))
    for i in tl.static_range(len(b_rest)):
        b_most = tl.maximum(b_most, tl.max(tl.abs(b_rest[i].to(tl.float32)), 1))
    b_exponent = b_most.to(tl.int32, bitcast=True) & 0x7F800000
    b_power = tl.maximum(b_exponent, 0x00800000).to(tl.float32, bitcast=True)  # at least the least normal number
    b_levelled, b_others = (), ()
    for i in tl.static_range(len(b_query)):
        b_levelled += ((b_query[i].to(tl.float32) / b_power[:, None]).to(DTYPE),)  # type: ignore[assignment]
    for i in tl.static_range(len(b_rest)):
        b_others += ((b_rest[i].to(tl.float32) / b_power[:, None]).to(DTYPE),)  # type: ignore[assignment]
    return b_levelled, b_others, b_power


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
def weigh(b_score: tl.tensor, b_max: tl.tensor, b_sum: tl.tensor, NEVER_EMPTY: tl.constexpr) -> tl.tensor:
    """A block of scores `[M, N]` joins rows of (maximum, sum, weighted rows): the new maximum and sum, the weights
    `[M, N]` of the block, and what to multiply the weighted rows by that were there.

    NEVER_EMPTY promises that every row has seen a token by now; without it a row of -inf stays what it was.
    """
    b_new = tl.maximum(b_max, tl.max(b_score, 1))
    b_shift = b_new if NEVER_EMPTY else tl.where(b_new == float("-inf"), 0.0, b_new)
    b_weight = tl.exp2(b_score - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    return b_new, b_sum * b_decay + tl.sum(b_weight, 1), b_weight, b_decay


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
    """Take a block of scores `[M, N]` and value rows `[N, V]` into a row's (maximum, sum, weighted rows): `weigh`."""
    b_max, b_sum, b_weight, b_decay = weigh(b_score, b_max, b_sum, NEVER_EMPTY)
    b_out = tl.dot(b_weight.to(b_value.dtype), b_value, b_out * b_decay[:, None], input_precision=PRECISION)
    return b_max, b_sum, b_out


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
