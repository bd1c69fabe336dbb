"""Experts of few pairs, as a token that decodes alone has them: no two are of one expert, and of two tokens few are.

So each pair is a linear layer of one row (`isthmus.kernels.linear_row`) with the weight of its expert, and there is
nothing to sort. See `isthmus.kernels.experts` for pairs and for more of them.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.linear_row import RowConfig, ahead, row_config, row_sums

_FEW = 16
_SPREAD = 4  # experts for each pair: where there are fewer, a weight would often be read twice


def are_few(pairs: int, experts: int, itemsize: int, *, transposed: bool) -> bool:
    """Whether so many pairs are for `expert_rows`: weights of 16 bits, whose inputs lie together."""
    return pairs <= min(_FEW, experts // _SPREAD) and itemsize == 2 and not transposed


@triton.jit
def _expert_rows_kernel(
    p_x: tl.tensor,
    p_expert: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    x_row: tl.int64,
    outputs: tl.int32,
    inputs: tl.int32,
    SHARE: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_pair = tl.program_id(1)
    o_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_in = tl.arange(0, BLOCK_K)
    there = o_out < outputs
    wait_for_previous(DEPENDENT)
    expert = tl.load(p_expert + i_pair).to(tl.int64)
    p_weights = p_weight + (expert * outputs + o_out)[:, None] * inputs
    b_ahead = ahead(p_weights, o_in, there, inputs, AHEAD, BLOCK_K, EVEN)
    p_row = p_x + (i_pair // SHARE).to(tl.int64) * x_row
    b_out = row_sums(p_weights, p_row, b_ahead, o_in, there, inputs, AHEAD, STAGES, BLOCK_N, BLOCK_K, EVEN)
    if BIAS:
        b_out += tl.load(p_bias + expert * outputs + o_out, mask=there, other=0.0).to(tl.float32)
    tl.store(p_out + i_pair * outputs + o_out, b_out.to(p_out.dtype.element_ty), mask=there)


def expert_rows(
    x: Tensor,
    expert_of: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    config: RowConfig | None = None,
    early: bool,
) -> Tensor:
    """Each pair's row times its expert's weight, with fp32 sums.

    Args:
        x: `[tokens, K]` with `top_k` pairs a token, or `[pairs, K]` with `top_k` 1; unit last stride.
        expert_of: integers `[pairs]` below `experts`, contiguous.
        weight: `[experts, N, K]`, contiguous.
        bias: `[experts, N]`, contiguous.
        config: the build; `row_config` of all pairs' outputs, if not given. What comes ahead waits here, too: the
            router's choice is no older than the kernel before.
        early: it may begin before the kernel before it has ended (`isthmus.kernels.dependent`).

    Returns:
        `[pairs, N]`.
    """
    _, outputs, inputs = weight.shape
    pairs = len(x) * top_k
    assert expert_of.shape == (pairs,), "an expert for every pair"
    assert expert_of.is_contiguous(), "pairs of a token lie together"
    assert x.shape[1] == inputs, "rows are as long as the weight is wide"
    assert x.stride(1) == 1, "elements of a row lie together"
    assert weight.is_contiguous(), "an expert's weight lies together"
    out = x.new_empty(pairs, outputs)
    if pairs == 0:
        return out
    built = config or row_config(pairs * outputs)
    _expert_rows_kernel[(triton.cdiv(outputs, built.block_n), pairs)](
        x,
        expert_of,
        weight,
        bias,
        out,
        x.stride(0),
        outputs,
        inputs,
        SHARE=top_k,
        BIAS=bias is not None,
        **built.constants(inputs),
        **dependent_launch(early),
    )
    return out
