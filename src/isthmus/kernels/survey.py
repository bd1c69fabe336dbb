"""One pass over rows of logits on a GPU: per granule of 256 tokens the largest key and the mass.

A key is a float32 as an int32 of the same order. All that chooses or scores a token starts from a survey, and reads
only the granules that matter after it.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GRANULE = 256
"""Tokens whose largest key and mass are taken together."""

TILE_GRANULES = 16  # granules that a program reads at a time: 8 KiB of bfloat16
INFINITE = tl.constexpr(0x7F800000)  # the key of infinity; NaN is above it
LOWEST = tl.constexpr(-0x7F800001)  # the key of -infinity
NOTHING = tl.constexpr(-0x80000000)  # below every key


@triton.jit
def key_of(b_x: tl.tensor) -> tl.tensor:
    """float32 -> int32 of the same order; -0 equals 0, NaN is above infinity."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    b_key = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    return tl.where((b_bits & 0x7FFFFFFF) > INFINITE, 0x7FFFFFFF, b_key)  # NaN


@triton.jit
def value_of(b_key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _survey_kernel(
    p_logits: tl.tensor,
    stride: tl.int64,
    width: tl.int32,
    p_which: tl.tensor | None,
    p_how: tl.tensor | None,
    p_peaks: tl.tensor,
    p_masses: tl.tensor | None,
    GRANULES: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    row = i_row
    if p_which is not None:
        row = tl.load(p_which + i_row * 4).to(tl.int64)
    o_granules = tl.program_id(1) * TILE + tl.arange(0, TILE)
    o_tokens = o_granules[:, None] * GRANULE + tl.arange(0, GRANULE)[None, :]
    b_x = tl.load(p_logits + row * stride + o_tokens, mask=o_tokens < width, other=-float("inf")).to(tl.float32)
    b_peak = tl.max(key_of(b_x), 1)
    tl.store(p_peaks + i_row * GRANULES + o_granules, b_peak)
    if p_masses is not None:
        scale = 1.0
        if p_how is not None:
            scale = tl.load(p_how + i_row * 4).to(tl.float32)
        b_base = tl.where(b_peak > LOWEST, value_of(b_peak), 0.0)
        b_mass = tl.sum(tl.exp((b_x - b_base[:, None]) * scale), 1)
        tl.store(p_masses + i_row * GRANULES + o_granules, b_mass)


def survey(
    logits: Tensor, vocab_size: int, which: Tensor | None, how: Tensor | None, *, mass: bool
) -> tuple[Tensor, Tensor | None]:
    """int32 keys of the peaks `[S, granules]`, and float32 masses relative to each granule's own peak if asked for.

    Rows are `which[:, 0]` of `logits` or all of them; temperatures are `1 / how[:, 0]` or 1. The number of granules
    is padded to a power of two, and what is behind the row's last one is not defined.
    """
    rows = len(logits) if which is None else len(which)
    granules = granule_count(vocab_size)
    peaks = torch.empty(rows, granules, dtype=torch.int32, device=logits.device)
    masses = torch.empty(rows, granules, device=logits.device) if mass else None
    tiles = triton.cdiv(vocab_size, TILE_GRANULES * GRANULE)
    _survey_kernel[(rows, tiles)](
        logits, row_stride(logits), vocab_size, which, how, peaks, masses, granules, TILE_GRANULES, GRANULE
    )
    return peaks, masses


def granule_count(vocab_size: int) -> int:
    """Granules of a row, padded to a power of two that tiles divide."""
    padded: int = triton.next_power_of_2(triton.cdiv(vocab_size, GRANULE))
    return max(TILE_GRANULES, padded)


def row_stride(logits: Tensor) -> int:
    """Elements from row to row; of a single row too, where torch may report anything. AssertionError for other
    strides than rows of adjacent columns."""
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    return logits.stride(0) if len(logits) > 1 else logits.shape[1]
