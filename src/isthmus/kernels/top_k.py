"""The largest numbers of short rows, as routers of experts choose them.

A program holds a row as integers of the same order, and takes the first of the largest k times. Two reductions of
32-bit integers find it: a warp does each in one instruction.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.survey import NOTHING, key_of
from isthmus.kernels.views import stride

WIDEST = 4096
"""Numbers of a row that a program can hold."""

MOST = 64
"""Of them, that it may be asked for: it takes one after the other."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_WARP = 32
_WARP_NUMBERS = 512  # at most, of a row, for each warp


@triton.jit
def _top_k_kernel(
    p_x: tl.tensor,
    p_values: tl.tensor,
    p_indices: tl.tensor,
    x_row: tl.int64,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_n, o_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    p_row = p_x + i_row * x_row
    wait_for_previous(DEPENDENT)
    b_x = tl.load(p_row + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_key = tl.where(o_n < N, key_of(b_x), NOTHING)
    b_index = tl.zeros([BLOCK_K], tl.int32)
    for i in range(K):
        index = tl.min(tl.where(b_key == tl.max(b_key, 0), o_n, BLOCK_N), 0)
        b_index = tl.where(o_k == i, index, b_index)
        b_key = tl.where(o_n == index, NOTHING, b_key)
    o_out, inside = i_row * K + o_k, o_k < K
    tl.store(p_values + o_out, tl.load(p_row + b_index, mask=inside), mask=inside)
    tl.store(p_indices + o_out, b_index.to(tl.int64), mask=inside)


def top_k(x: Tensor, k: int, *, early: bool) -> tuple[Tensor, Tensor]:
    """x `[rows, n]` of one of `DTYPES`, unit last stride, n at most `WIDEST`; 0 < k <= min(n, `MOST`) -> the k largest
    numbers of each row, largest first, and where they lie, int64: both `[rows, k]`.

    Of equal numbers the first comes first; -0 equals 0, and NaN is the largest, as in `torch.topk`. Every index is of
    the row and no other of it, whatever the numbers are.

    early: it may begin before the kernel before it has ended (`isthmus.kernels.dependent`).
    """
    rows, n = x.shape
    assert x.dtype in DTYPES, "no such dtype"
    assert n <= WIDEST, "a program holds a row"
    assert 0 < k <= min(n, MOST), "more than a row has, or than are taken one after the other"
    assert stride(x, 1) in (0, 1), "a row lies together"
    values = x.new_empty(rows, k)
    indices = x.new_empty((rows, k), dtype=torch.int64)
    if rows == 0:
        return values, indices
    block = max(_WARP, triton.next_power_of_2(n))
    _top_k_kernel[(rows,)](
        x,
        values,
        indices,
        x.stride(0) if rows > 1 else n,  # torch may report anything for one row, and kernels are compiled for it
        N=n,
        K=k,
        BLOCK_N=block,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=max(1, block // _WARP_NUMBERS),
        **dependent_launch(early),
    )
    return values, indices
