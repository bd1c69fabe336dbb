"""Linear layers of one row, as a sequence that decodes alone has them.

Matrix units take sixteen rows, and to keep every multiprocessor busy by tiles of outputs as large as theirs, the inputs
must be cut and the parts added up, which takes longer than the products (`isthmus.kernels.linear`). Here a program has
all inputs of a few outputs, and vector units multiply. For two rows most layers are already slower. A program asks for
the first of its weights before it waits.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.linear import block
from isthmus.kernels.views import stride


class RowConfig(NamedTuple):
    """How `linear_row` and `expert_rows` are built."""

    block_n: int  # outputs of a program
    block_k: int  # inputs at a time
    num_warps: int
    num_stages: int  # num_stages - 1 blocks are in flight
    ahead: int  # blocks of inputs whose weights are asked for at once; by `linear_row` before it waits

    def constants(self, inputs: int) -> dict[str, int]:
        """What a kernel of it is built with, for so many inputs."""
        return {
            "EVEN": inputs % self.block_k == 0,
            "AHEAD": min(self.ahead, triton.cdiv(inputs, self.block_k)),
            "STAGES": self.num_stages,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
        }


_BUILDS = (
    (2560, RowConfig(2, 1024, 4, 1, 2)),
    (5120, RowConfig(4, 512, 4, 1, 2)),
    (10_240, RowConfig(8, 256, 4, 1, 4)),
)
_WIDE = RowConfig(16, 256, 4, 4, 2)


def row_config(outputs: int) -> RowConfig:
    """The build for so many outputs: of some thirty on an H200 (docs/gpu.md)."""
    return next((config for most, config in _BUILDS if outputs <= most), _WIDE)


@triton.jit
def _row_linear_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    outputs: tl.int32,
    inputs: tl.int32,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    o_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_in = tl.arange(0, BLOCK_K)
    there = o_out < outputs
    p_weights = p_weight + o_out.to(tl.int64)[:, None] * inputs
    b_ahead = ahead(p_weights, o_in, there, inputs, AHEAD, BLOCK_K, EVEN)
    wait_for_previous(DEPENDENT)
    b_out = row_sums(p_weights, p_x, b_ahead, o_in, there, inputs, AHEAD, STAGES, BLOCK_N, BLOCK_K, EVEN)
    if BIAS:
        b_out += tl.load(p_bias + o_out, mask=there, other=0.0).to(tl.float32)
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=there)


@triton.jit
def ahead(
    p_weights: tl.tensor,
    o_in: tl.tensor,
    there: tl.tensor,
    inputs: tl.int32,
    AHEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """A tuple: the first AHEAD blocks of weights, of rows that begin at `p_weights` `[N, 1]`."""
    b_ahead = ()
    for i in tl.static_range(AHEAD):
        b_ahead += (block(p_weights, i * BLOCK_K + o_in, there, inputs, EVEN),)  # type: ignore[assignment]
    return b_ahead


@triton.jit
def row_sums(
    p_weights: tl.tensor,
    p_x: tl.tensor,
    b_ahead: tl.tensor,
    o_in: tl.tensor,
    there: tl.tensor,
    inputs: tl.int32,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """`[N]`: rows of weights times the row at `p_x`, with what `ahead` has of them."""
    b_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(AHEAD):
        o_at = i * BLOCK_K + o_in
        b_x = tl.load(p_x + o_at, mask=o_at < inputs, other=0.0)
        b_sums += b_ahead[i].to(tl.float32) * b_x.to(tl.float32)[None, :]
    for start in tl.range(AHEAD * BLOCK_K, inputs, BLOCK_K, num_stages=STAGES):
        o_at = start + o_in
        b_weight = block(p_weights, o_at, there, inputs, EVEN)
        b_x = tl.load(p_x + o_at, mask=o_at < inputs, other=0.0)
        b_sums += b_weight.to(tl.float32) * b_x.to(tl.float32)[None, :]
    return tl.sum(b_sums, 1)


def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None, config: RowConfig | None = None) -> Tensor:
    """x `[1, inputs]`, unit last stride; weight `[outputs, inputs]`, contiguous; bias `[outputs]` -> `[1, outputs]`.

    All of one 16-bit type; sums are fp32. The weight is read early: no kernel of the forward may write it. It can be
    captured in a CUDA graph. `config`: that of `row_config`, if not given.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    assert rows == 1, "for one row"
    assert weight.is_contiguous(), "a weight's rows lie one behind the other"
    assert stride(x, 1) in (0, 1), "a row lies together"
    out = x.new_empty(1, outputs)
    built = config or row_config(outputs)
    _row_linear_kernel[(triton.cdiv(outputs, built.block_n),)](
        x,
        weight,
        bias,
        out,
        outputs,
        inputs,
        BIAS=bias is not None,
        **built.constants(inputs),
        **dependent_launch(),
    )
    return out
