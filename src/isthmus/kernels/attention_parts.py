"""Parts of a softmax over many keys: left in a workspace by who has computed them, merged in the order of their slots.

A part is (maximum, sum, weighted rows) of ROWS rows in float32, see `isthmus.kernels.attention_softmax`. It may have
seen nothing of what a row sees, where windows end: its maximum is -inf there, its sum 0.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.kernels.attention_softmax import finish


@triton.jit
def store_part(
    p_rows: tl.tensor,
    p_stats: tl.tensor,
    slot: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    o_row: tl.tensor,
    o_value: tl.tensor,
    live: tl.tensor,
    ROWS: tl.constexpr,
    V_DIM: tl.constexpr,
) -> None:
    """Put the `live` rows of a part into `slot` (counted over units too) of the workspace."""
    at = slot.to(tl.int64) * ROWS
    tl.store(p_stats + at * 2 + o_row, b_max, mask=live)
    tl.store(p_stats + at * 2 + ROWS + o_row, b_sum, mask=live)
    p_out = p_rows + at * V_DIM + o_row[:, None] * V_DIM + o_value[None, :]
    tl.store(p_out, b_out, mask=live[:, None] & (o_value < V_DIM)[None, :])


@triton.jit
def merge_parts(
    p_rows: tl.tensor,
    p_stats: tl.tensor,
    slot: tl.tensor,
    step: tl.tensor,
    parts: tl.tensor,
    o_row: tl.tensor,
    o_value: tl.tensor,
    live: tl.tensor,
    ROWS: tl.constexpr,
    V_DIM: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(maximum, sum, weighted rows) of slots `slot`, `slot + step`, .., in that order.

    Rows that are not `live` come out as an empty part. Other programs wrote the slots, so nothing is taken from L1.
    STAGES - 1 parts are on their way while one is merged.
    """
    inside = live[:, None] & (o_value < V_DIM)[None, :]
    b_max = tl.where(live, float("-inf"), 0.0)
    b_sum = tl.zeros_like(b_max)
    b_out = tl.zeros([o_row.shape[0], o_value.shape[0]], tl.float32)
    for i in tl.range(0, parts, num_stages=STAGES):
        at = (slot + i * step).to(tl.int64) * ROWS
        b_part_max = tl.load(p_stats + at * 2 + o_row, mask=live, other=0.0, cache_modifier=".cg")
        b_part_sum = tl.load(p_stats + at * 2 + ROWS + o_row, mask=live, other=0.0, cache_modifier=".cg")
        p_part = p_rows + at * V_DIM + o_row[:, None] * V_DIM + o_value[None, :]
        b_part = tl.load(p_part, mask=inside, other=0.0, cache_modifier=".cg")
        b_new = tl.maximum(b_max, b_part_max)
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_old_weight = tl.exp2(b_max - b_shift)
        b_part_weight = tl.exp2(b_part_max - b_shift)
        b_sum = b_sum * b_old_weight + b_part_sum * b_part_weight
        b_out = b_out * b_old_weight[:, None] + b_part * b_part_weight[:, None]
        b_max = b_new
    return b_max, b_sum, b_out


@triton.jit
def store_mean(
    p_row: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    p_sinks: tl.tensor,
    o_head: tl.tensor,
    live: tl.tensor,
    inside: tl.tensor,
    v_scale: tl.float32,
    SINKS: tl.constexpr,
) -> None:
    """Write what rows come to at `p_row`, sinks taken in, in the type of the output."""
    b_mean = finish(b_max, b_sum, b_out, p_sinks, o_head, live, v_scale, SINKS)
    tl.store(p_row, b_mean.to(p_row.dtype.element_ty), mask=inside)
