"""Linear layers of which every token uses some, chosen by a router: experts.

A pair is a token and one of its experts; pair p is of token p // top_k. `sort_pairs` brings them into the order of
their experts and cuts those of one expert into tiles; `expert_linear` multiplies a tile's rows with its expert's
weight. Rows are read and written where they lie, by pair or by token, so nothing is gathered or put back. Nothing is
read by the host, and launches depend on the number of pairs alone: a captured CUDA graph serves any routing.

Pairs of one expert come in any order. No result depends on it: a row of a product is summed up alike wherever in a
tile it stands. Padding to whole tiles is what MegaBlocks (Gale, Narayanan, Young and Zaharia, 2022) does; here a tile
that is not full has rows that nobody writes.
"""
# ruff: noqa: N803, PLR0912, SIM108 - compile-time constants of kernels are in capitals, and choose what is built
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous

_FEW = 4096
"""Pairs that one program sorts faster than three launches do."""

_SORTED = 1024
"""Pairs at a time, however few there are: their number must not be compiled in."""

_LEAST_ROWS = 16
"""Of a tile, in any build."""

_TILE = 3
"""Numbers of a tile: its expert (-1: there is no such tile), the first of its pairs in their order, behind the last."""


class Config(NamedTuple):
    """How `expert_linear` is built."""

    block_m: int  # pairs
    block_n: int  # outputs
    block_k: int  # inputs at a time
    num_warps: int
    num_stages: int


def config_of(pairs: int, experts: int, itemsize: int) -> Config:
    """The build for so many pairs and experts, and the bytes of a weight's element.

    Within 5 % of the fastest of some twenty on an H200, for 32 experts of 2,880 and 512 of 512 (docs/gpu.md).
    """
    if itemsize > 2:
        return Config(16, 32, 32, 4, 2)
    rows = pairs / experts  # of an expert, on average
    if rows <= 12:
        return Config(16, 128, 64, 8, 4)
    return Config(64 if rows <= 200 else 128, 256, 64, 8, 3)


class Work(NamedTuple):
    """Pairs in the order of their experts, as parts of one tensor of integers."""

    order: Tensor  # int32 [pairs]
    tiles: Tensor  # int32 [most, 3]
    cursor: Tensor  # int32 [experts]: scratch

    @classmethod
    def of(cls, work: Tensor, pairs: int, experts: int, block_m: int) -> Work:
        """`work` is int32 `[work_size(pairs, experts)]`."""
        most = most_tiles(pairs, experts, block_m)
        tiles = work[pairs : pairs + _TILE * most]
        return cls(work[:pairs], tiles.view(most, _TILE), work[-experts:])


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """There are never more, however the pairs are routed."""
    return min(pairs, pairs // block_m + experts)


def work_size(pairs: int, experts: int) -> int:
    """Of what `sort_pairs` returns, whatever the build; also of a symbolic number of pairs."""
    return pairs + _TILE * (pairs // _LEAST_ROWS + experts) + experts


@triton.jit(do_not_specialize=["p_count", "pairs"])
def _count_kernel(p_expert: tl.tensor, p_count: tl.tensor, pairs: tl.int32, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    o_pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_expert = tl.arange(0, BLOCK_E)
    there = o_pair < pairs
    b_expert = tl.load(p_expert + o_pair, mask=there, other=0).to(tl.int32)
    b_count = tl.histogram(b_expert, BLOCK_E, mask=there)
    tl.atomic_add(p_count + o_expert, b_count, mask=b_count > 0)


@triton.jit
def _place(
    p_expert: tl.tensor,
    p_order: tl.tensor,
    p_cursor: tl.tensor,
    first: tl.int32,
    pairs: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """Put pairs from `first` on where their experts' cursors are."""
    o_pair = first + tl.arange(0, BLOCK)
    there = o_pair < pairs
    b_expert = tl.load(p_expert + o_pair, mask=there, other=0).to(tl.int32)
    b_slot = tl.atomic_add(p_cursor + b_expert, tl.full([BLOCK], 1, tl.int32), mask=there)
    tl.store(p_order + b_slot, o_pair, mask=there)


@triton.jit(do_not_specialize=["p_order", "p_tiles", "p_cursor", "pairs", "most"])
def _plan_kernel(
    p_expert: tl.tensor,
    p_order: tl.tensor,
    p_tiles: tl.tensor,
    p_cursor: tl.tensor,
    pairs: tl.int32,
    most: tl.int32,
    EXPERTS: tl.constexpr,
    FEW: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Cut each expert's pairs into tiles, and point the cursors at the first. Of FEW pairs, also count and place them;
    otherwise the cursors hold their numbers."""
    let_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    o_expert = tl.arange(0, BLOCK_E)
    known = o_expert < EXPERTS
    if FEW:
        b_count = tl.zeros([BLOCK_E], tl.int32)
        for first in tl.range(0, pairs, BLOCK):
            o_pair = first + tl.arange(0, BLOCK)
            there = o_pair < pairs
            b_count += tl.histogram(tl.load(p_expert + o_pair, mask=there, other=0).to(tl.int32), BLOCK_E, mask=there)
    else:
        b_count = tl.load(p_cursor + o_expert, mask=known, other=0)
    b_end = tl.cumsum(b_count, 0)
    b_start = b_end - b_count
    tl.store(p_cursor + o_expert, b_start, mask=known)
    b_tiles = (b_count + BLOCK_M - 1) // BLOCK_M
    b_behind = tl.cumsum(b_tiles, 0)
    for i in tl.range(0, tl.max(b_tiles, 0)):
        p_tile = p_tiles + (b_behind - b_tiles + i) * 3
        b_first = b_start + i * BLOCK_M
        tl.store(p_tile, o_expert, mask=i < b_tiles)
        tl.store(p_tile + 1, b_first, mask=i < b_tiles)
        tl.store(p_tile + 2, tl.minimum(b_first + BLOCK_M, b_end), mask=i < b_tiles)
    for i in tl.range(tl.max(b_behind, 0), most, BLOCK_E):
        tl.store(p_tiles + (i + o_expert) * 3, tl.full([BLOCK_E], -1, tl.int32), mask=i + o_expert < most)
    if FEW:
        tl.debug_barrier()  # every cursor is where it must be before any thread moves one
        for first in tl.range(0, pairs, BLOCK):
            _place(p_expert, p_order, p_cursor, first, pairs, BLOCK)


@triton.jit(do_not_specialize=["p_order", "p_cursor", "pairs"])
def _place_kernel(
    p_expert: tl.tensor, p_order: tl.tensor, p_cursor: tl.tensor, pairs: tl.int32, BLOCK: tl.constexpr
) -> None:
    _place(p_expert, p_order, p_cursor, tl.program_id(0) * BLOCK, pairs, BLOCK)


def sort_pairs(expert_of: Tensor, experts: int, block_m: int, *, early: bool) -> Tensor:
    """Plan the products of a step.

    Args:
        expert_of: integers `[pairs]` below `experts`, contiguous.
        block_m: of the build that will take it, see `config_of`.
        early: it may begin before the kernel before it has ended (`isthmus.kernels.dependent`).

    Returns:
        what `Work.of` takes apart.
    """
    (pairs,) = expert_of.shape
    assert expert_of.is_contiguous(), "pairs of a token lie together"
    work = torch.empty(work_size(pairs, experts), dtype=torch.int32, device=expert_of.device)
    order, tiles, cursor = Work.of(work, pairs, experts, block_m)
    if pairs == 0:
        return work
    few, block_e, blocks = pairs <= _FEW, max(16, triton.next_power_of_2(experts)), triton.cdiv(pairs, _SORTED)
    if not few:
        _count_kernel[(blocks,)](expert_of, cursor.zero_(), pairs, BLOCK=_SORTED, BLOCK_E=block_e)
    _plan_kernel[(1,)](
        expert_of,
        order,
        tiles,
        cursor,
        pairs,
        len(tiles),
        EXPERTS=experts,
        FEW=few,
        BLOCK_M=block_m,
        BLOCK=_SORTED,
        BLOCK_E=block_e,
        num_warps=8,
        **dependent_launch(early and few),
    )
    if not few:
        _place_kernel[(blocks,)](expert_of, order, cursor, pairs, BLOCK=_SORTED)
    return work


@triton.jit(do_not_specialize=["p_order", "p_tiles", "most"])
def _linear_kernel(
    p_x: tl.tensor,
    p_out: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_order: tl.tensor,
    p_tiles: tl.tensor,
    most: tl.int32,
    x_row: tl.int64,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    # Who runs at the same time shares a tile's rows, or an expert's weight.
    if TILE_FIRST:
        i_tile, i_block = tl.program_id(0) % most, tl.program_id(0) // most
    else:
        i_tile, i_block = tl.program_id(0) // tl.cdiv(N, BLOCK_N), tl.program_id(0) % tl.cdiv(N, BLOCK_N)
    wait_for_previous(DEPENDENT)
    expert = tl.load(p_tiles + i_tile * 3)
    if expert < 0:
        return
    o_slot = tl.load(p_tiles + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
    live = o_slot < tl.load(p_tiles + i_tile * 3 + 2)
    pair = tl.load(p_order + o_slot, mask=live, other=0)  # where there is none, a row that is there and goes nowhere
    o_out = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_in = tl.arange(0, BLOCK_K)
    wanted = o_out < N
    p_row = p_x + (pair // SHARE).to(tl.int64)[:, None] * x_row + o_in[None, :]
    p_own = p_weight + expert.to(tl.int64) * (N * K)
    if TRANSPOSED:
        p_block = p_own + o_in[:, None] * N + o_out[None, :]
    else:
        p_block = p_own + o_out[:, None] * K + o_in[None, :]
    b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        there = o_in < K - start
        if K % BLOCK_K == 0:
            b_x = tl.load(p_row)
        else:
            b_x = tl.load(p_row, mask=there[None, :] & (o_slot >= 0)[:, None], other=0.0)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            b_weight = tl.load(p_block)
        elif TRANSPOSED:
            b_weight = tl.load(p_block, mask=there[:, None] & wanted[None, :], other=0.0)
        else:
            b_weight = tl.load(p_block, mask=wanted[:, None] & there[None, :], other=0.0)
        if not TRANSPOSED:
            b_weight = tl.trans(b_weight)
        b_out = tl.dot(b_x, b_weight, b_out, input_precision=PRECISION)
        p_row += BLOCK_K
        p_block += BLOCK_K * N if TRANSPOSED else BLOCK_K
    if BIAS:
        b_out += tl.load(p_bias + expert * N + o_out, mask=wanted, other=0.0).to(tl.float32)[None, :]
    p_at = p_out + pair.to(tl.int64)[:, None] * N + o_out[None, :]
    tl.store(p_at, b_out.to(p_out.dtype.element_ty), mask=live[:, None] & wanted[None, :])


def _dividing(k: int, most: int) -> int:
    """The block of inputs, halved until it divides them: where none has a rest, loads need no mask."""
    block = most
    while k % block and block > 32:
        block //= 2
    return block if k % block == 0 else most


def expert_linear(
    x: Tensor,
    work: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    transposed: bool = False,
    config: Config | None = None,
    early: bool,
) -> Tensor:
    """Each pair's row times its expert's weight, with fp32 sums.

    Args:
        x: `[tokens, K]` with `top_k` pairs a token, or `[pairs, K]` with `top_k` 1; unit last stride.
        work: from `sort_pairs`, planned for the same build.
        weight: `[experts, N, K]`; `[experts, K, N]` if `transposed`; contiguous.
        bias: `[experts, N]`, contiguous.
        early: as in `sort_pairs`.

    Returns:
        `[pairs, N]`.
    """
    experts = len(weight)
    n, k = weight.shape[1:] if not transposed else (weight.shape[2], weight.shape[1])
    pairs = len(x) * top_k
    assert x.shape[1] == k, "rows are as long as the weight is wide"
    assert x.stride(1) == 1, "elements of a row lie together"
    assert weight.is_contiguous(), "an expert's weight lies together"
    out = x.new_empty(pairs, n)
    if pairs == 0:
        return out
    built = config or config_of(pairs, experts, weight.itemsize)
    order, tiles, _ = Work.of(work, pairs, experts, built.block_m)
    _linear_kernel[(len(tiles) * triton.cdiv(n, built.block_n),)](
        x,
        out,
        weight,
        x if bias is None else bias,
        order,
        tiles,
        len(tiles),
        x.stride(0),
        N=n,
        K=k,
        SHARE=top_k,
        TRANSPOSED=transposed,
        BIAS=bias is not None,
        TILE_FIRST=built.block_m > 64,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=built.block_m,
        BLOCK_N=built.block_n,
        BLOCK_K=_dividing(k, built.block_k),
        num_warps=built.num_warps,
        num_stages=built.num_stages,
        **dependent_launch(early),
    )
    return out
