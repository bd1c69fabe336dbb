"""Linear layers of few rows, as decodes have them.

They take as long as their weights, if those come at the rate of the memory: a program reads BLOCK_N rows of the weight
once, for all rows of the input. Where that would be too few programs, each takes a part of the inputs; parts are added
up in their order by whoever finishes last, so a result does not depend on who that is.

A library's product is as fast for more rows. For few, a good deal of its time is the start: the kernel waits for the
one before it to end, asks for its first weights then, and often launches a second to add up. Here a program has its
first weights before it waits, if all programs run at once: where they take turns, what they hold lets fewer run.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.arrive import arrive_last
from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.device import cores
from isthmus.kernels.views import stride

MOST_ROWS = 16
"""Of an input, in any build."""

TILES = 1 << 16
"""Counters that a launch may need: more tiles of outputs there are not."""

_LEAST_INPUTS = 256  # of a part

_AT_ONCE = 2  # programs that a multiprocessor of an H200 has room for, with what they have ahead


class Config(NamedTuple):
    """How `linear` is built."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inputs at a time
    num_warps: int
    num_stages: int
    ahead: int  # blocks of inputs whose weights are had before the kernel waits, if all its programs run at once


def config_of(rows: int, itemsize: int) -> Config | None:
    """The build for so many rows, or None where a library is as fast: of some forty on an H200 (docs/gpu.md)."""
    return Config(16, 64, 128, 4, 3, 2) if itemsize == 2 and rows <= MOST_ROWS else None


def parts_of(outputs: int, inputs: int, config: Config, multiprocessors: int) -> int:
    """Into how many parts the inputs are cut: at most so many that all programs run at once, and one where the tiles of
    outputs alone are more."""
    tiles = triton.cdiv(outputs, config.block_n)
    most = max(1, _AT_ONCE * multiprocessors // tiles)
    blocks = triton.cdiv(inputs, config.block_k)
    each = max(triton.cdiv(blocks, most), min(blocks, triton.cdiv(_LEAST_INPUTS, config.block_k)))
    return int(triton.cdiv(blocks, each))


@triton.jit(do_not_specialize=["rows", "parts"])
def _few_rows_linear_kernel(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    p_parts: tl.tensor,
    p_counters: tl.tensor,
    x_row: tl.int64,
    rows: tl.int32,
    outputs: tl.int32,
    inputs: tl.int32,
    parts: tl.int32,
    BIAS: tl.constexpr,
    CUT: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_tile, i_part = tl.program_id(0) // parts, tl.program_id(0) % parts
    o_row = tl.arange(0, BLOCK_M)
    o_out = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_in = tl.arange(0, BLOCK_K)
    live, there = o_row < rows, o_out < outputs
    some = tl.cdiv(tl.cdiv(inputs, BLOCK_K), parts) * BLOCK_K
    begin = i_part * some
    end = tl.where(begin + some < inputs, begin + some, inputs)
    p_weights = p_weight + o_out.to(tl.int64)[:, None] * inputs
    p_inputs = p_x + o_row.to(tl.int64)[:, None] * x_row
    # The weight is the product's left side: it has more rows, which suits the matrix units better.
    b_out = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_ahead = ()
    for i_ahead in tl.static_range(AHEAD):
        b_ahead += (block(p_weights, begin + i_ahead * BLOCK_K + o_in, there, end, EVEN),)  # type: ignore[assignment]
    wait_for_previous(DEPENDENT)
    b_known = ()
    for i_ahead in tl.static_range(AHEAD):
        b_known += (block(p_inputs, begin + i_ahead * BLOCK_K + o_in, live, end, EVEN),)  # type: ignore[assignment]
    for start in tl.range(begin + AHEAD * BLOCK_K, end, BLOCK_K):
        b_weight = block(p_weights, start + o_in, there, end, EVEN)
        b_x = block(p_inputs, start + o_in, live, end, EVEN)
        b_out = tl.dot(b_weight, tl.trans(b_x), b_out)
    for i_ahead in tl.static_range(AHEAD):
        b_out = tl.dot(b_ahead[i_ahead], tl.trans(b_known[i_ahead]), b_out)
    b_out = tl.trans(b_out)
    at = o_row.to(tl.int64)[:, None] * outputs + o_out[None, :]
    inside = live[:, None] & there[None, :]
    if CUT:
        size = rows.to(tl.int64) * outputs
        tl.store(p_parts + i_part * size + at, b_out, mask=inside)
        last = arrive_last(p_counters + i_tile, parts)
        if last:
            b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i in tl.range(0, parts):
                # Other programs wrote them, so nothing is taken from L1.
                b_out += tl.load(p_parts + i * size + at, mask=inside, other=0.0, cache_modifier=".cg")
            _store(p_bias, p_out + at, b_out, o_out, there, inside, BIAS)
    else:
        _store(p_bias, p_out + at, b_out, o_out, there, inside, BIAS)


@triton.jit
def block(p_rows: tl.tensor, o_at: tl.tensor, there: tl.tensor, end: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """These inputs of rows that begin at `p_rows` `[rows, 1]`; 0 for rows not `there` and inputs not before `end`."""
    mask = there[:, None] if EVEN else there[:, None] & (o_at < end)[None, :]
    return tl.load(p_rows + o_at[None, :], mask=mask, other=0.0)


@triton.jit
def _store(
    p_bias: tl.tensor,
    p_to: tl.tensor,
    b_out: tl.tensor,
    o_out: tl.tensor,
    there: tl.tensor,
    inside: tl.tensor,
    BIAS: tl.constexpr,
) -> None:
    if BIAS:
        b_out += tl.load(p_bias + o_out, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(p_to, b_out.to(p_to.dtype.element_ty), mask=inside)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    config: Config,
    *,
    multiprocessors: int | None = None,
) -> Tensor:
    """x `[rows, inputs]` with unit last stride, at most `config.block_m` rows of them; weight `[outputs, inputs]`,
    contiguous; bias `[outputs]` -> `[rows, outputs]`. The weight is read early: no kernel of the forward may write it.

    `counters` int32 `[TILES]`, 0 between launches: launches of one stream share them. Nothing is read by the host, so
    it can be captured in a CUDA graph. `multiprocessors`: those of x's GPU, if not given.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    assert weight.is_contiguous(), "a weight's rows lie one behind the other"
    assert rows <= config.block_m, "not the build for so many rows"
    assert stride(x, 1) in (0, 1), "a row lies together"
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    tiles = triton.cdiv(outputs, config.block_n)
    assert tiles <= len(counters), "more tiles than counters"
    if multiprocessors is None:
        multiprocessors = cores(x.device)
    parts = parts_of(outputs, inputs, config, multiprocessors)
    blocks = triton.cdiv(triton.cdiv(inputs, config.block_k), parts)
    partial = x.new_empty((parts, rows, outputs), dtype=torch.float32) if parts > 1 else None
    _few_rows_linear_kernel[(tiles * parts,)](
        x,
        weight,
        bias,
        out,
        partial,
        counters,
        stride(x, 0),
        rows,
        outputs,
        inputs,
        parts,
        BIAS=bias is not None,
        CUT=parts > 1,
        EVEN=inputs % (config.block_k * parts) == 0,
        AHEAD=min(config.ahead, blocks) if tiles * parts <= _AT_ONCE * multiprocessors else 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(),
    )
    return out
