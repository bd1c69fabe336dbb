"""Some tokens' heads out of a flat batch, end to end, brought to unit length on the way where that is wanted."""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.gated_delta import UNIT
from isthmus.kernels.views import stride

ELEMENTS = 4096
"""Per program, so many numbers: 16 bytes a thread and load, twice."""


@triton.jit(do_not_specialize=["p_tokens", "rows"])
def _take_kernel(
    p_x: tl.tensor,
    p_tokens: tl.tensor,
    p_out: tl.tensor,
    rows: tl.int32,
    x_token: tl.int64,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_width = tl.arange(0, BLOCK_W)
    live = o_row < rows
    inside = live[:, None] & (o_width < WIDTH)[None, :]
    token = tl.load(p_tokens + o_row // HEADS, mask=live, other=0).to(tl.int64)
    o_x = token * x_token + o_row % HEADS * WIDTH
    b_x = tl.load(p_x + o_x[:, None] + o_width[None, :], mask=inside, other=0.0)
    if UNIT > 0:
        b_wide = b_x.to(tl.float32)
        b_x = b_wide * tl.rsqrt(tl.sum(b_wide * b_wide, 1) + UNIT)[:, None]
    tl.store(p_out + o_row[:, None] * WIDTH + o_width[None, :], b_x.to(p_out.dtype.element_ty), mask=inside)


def take_heads(x: Tensor, tokens: Tensor, *, unit: bool = False) -> Tensor:
    """`x[tokens]`, contiguous.

    Args:
        x: `[T, heads, width]`, a token's numbers contiguous.
        tokens: `[n]` of T.
        unit: each head of a token to unit length, as `isthmus.kernels.gated_delta` has it, then rounded.
    """
    _, heads, width = x.shape
    assert x[0].is_contiguous(), "heads of a token are contiguous"
    out = x.new_empty(len(tokens), heads, width)
    block_w = triton.next_power_of_2(width)
    block_r = max(1, ELEMENTS // block_w)
    rows = len(tokens) * heads
    if rows == 0:
        return out
    _take_kernel[(triton.cdiv(rows, block_r),)](
        x,
        tokens,
        out,
        rows,
        stride(x, 0),
        HEADS=heads,
        WIDTH=width,
        UNIT=UNIT if unit else 0,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
        num_warps=4,
    )
    return out


def put_heads(out: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """`out[tokens] = rows`, both contiguous `[.., heads, width]`, in words of 16 bytes where rows consist of them."""
    assert out.is_contiguous(), "rows of words"
    flat, given = out.flatten(1), rows.flatten(1)
    if flat.shape[1] * flat.itemsize % torch.complex128.itemsize == 0:
        flat, given = flat.view(torch.complex128), given.view(torch.complex128)
    flat.index_copy_(0, tokens, given)
