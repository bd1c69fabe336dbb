"""Rows of logits on a GPU beside the choice of a token: copied with edits, and scored.

Everything is queued on the current stream, in a number of launches that does not depend on the rows.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.survey import GRANULE, LOWEST, row_stride, survey, value_of

_BLOCK = 2048  # tokens of a program that copies or counts
_EDITS = 256  # of a program
_TOP_BYTES = 32 << 20  # of logits whose largest are taken at a time


@triton.jit
def _copy_kernel(
    p_logits: tl.tensor,
    stride: tl.int64,
    width: tl.int32,
    p_which: tl.tensor,
    p_masks: tl.tensor,
    p_copy: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_which + i_row * 4).to(tl.int64)
    mask = tl.load(p_which + i_row * 4 + 2).to(tl.int64)
    o_tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_tokens < width
    b_x = tl.load(p_logits + row * stride + o_tokens, mask=inside, other=0.0).to(tl.float32)
    if mask >= 0:
        b_bits = tl.load(p_masks + mask * tl.cdiv(width, 8) + o_tokens // 8, mask=inside, other=0).to(tl.int32)
        b_x = tl.where(((b_bits >> (o_tokens % 8)) & 1) > 0, b_x, -float("inf"))
    tl.store(p_copy + i_row * width + o_tokens, b_x, mask=inside)


@triton.jit(do_not_specialize=["first", "count"])
def _edit_kernel(
    p_copy: tl.tensor,
    p_place: tl.tensor,
    p_change: tl.tensor,
    first: tl.int32,
    count: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    o_edits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_edits < count
    o_edits += first
    b_place = tl.load(p_place + o_edits, mask=inside, other=0)
    b_bias = tl.load(p_change + o_edits * 3, mask=inside, other=0.0)
    b_penalty = tl.load(p_change + o_edits * 3 + 1, mask=inside, other=1.0)
    b_minus = tl.load(p_change + o_edits * 3 + 2, mask=inside, other=0.0)
    b_x = tl.load(p_copy + b_place, mask=inside, other=0.0)
    b_x = tl.where(b_bias == -float("inf"), b_bias, b_x + b_bias)
    b_x = tl.where(b_x > 0, tl.div_rn(b_x, b_penalty), b_x * b_penalty)
    tl.store(p_copy + b_place, b_x - b_minus, mask=inside)


@triton.jit
def _rank_kernel(
    p_logits: tl.tensor,
    stride: tl.int64,
    width: tl.int32,
    p_which: tl.tensor,
    p_targets: tl.tensor,
    p_counts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_which + i_row * 4).to(tl.int64)
    target = tl.maximum(tl.load(p_targets + row), 0)
    value = tl.load(p_logits + row * stride + target).to(tl.float32)
    o_tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_logits + row * stride + o_tokens, mask=o_tokens < width, other=-float("inf")).to(tl.float32)
    tl.store(p_counts + i_row * tl.num_programs(1) + tl.program_id(1), tl.sum((b_x > value).to(tl.int32), 0))


@triton.jit(do_not_specialize=["columns"])
def _score_kernel(
    p_logits: tl.tensor,
    stride: tl.int64,
    width: tl.int32,
    p_which: tl.tensor,
    p_targets: tl.tensor,
    p_peaks: tl.tensor,
    p_masses: tl.tensor,
    p_counts: tl.tensor,
    tiles: tl.int32,
    p_scores: tl.tensor,
    columns: tl.int32,
    GRANULES: tl.constexpr,
    GRANULE: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_which + i_row * 4).to(tl.int64)
    target = tl.load(p_targets + row)
    value = tl.load(p_logits + row * stride + tl.maximum(target, 0)).to(tl.float32)
    o_granules = tl.arange(0, GRANULES)
    inside = o_granules < tl.cdiv(width, GRANULE)
    b_key = tl.load(p_peaks + i_row * GRANULES + o_granules, mask=inside, other=LOWEST)
    b_peak = value_of(b_key)
    b_mass = tl.load(p_masses + i_row * GRANULES + o_granules, mask=inside, other=0.0).to(tl.float64)
    top = tl.max(b_peak, 0)
    total = tl.sum(b_mass * tl.exp(b_peak - top), 0)
    norm = top + tl.log(total.to(tl.float32))
    b_count = tl.load(p_counts + i_row * tiles + o_granules, mask=o_granules < tiles, other=0)
    p_score = p_scores + i_row * columns
    tl.store(p_score, target)
    tl.store(p_score + 1, tl.sum(b_count, 0) + 1)
    tl.store(p_score + 2, (value - norm).to(tl.int32, bitcast=True))
    tl.store(p_score + 3, norm.to(tl.int32, bitcast=True))


def copy_rows(logits: Tensor, vocab_size: int, which: Tensor, masks: Tensor) -> Tensor:
    """float32 `[S, vocab_size]`: rows `which[:, 0]` of the logits, -infinity where a mask has no bit. One launch.

    Args:
        logits: `[R, >= vocab_size]`, unchanged.
        which: int32 `[S, 4]`; column 2 is the row of `masks`, -1 for none.
        masks: uint8 `[M, ceil(vocab_size / 8)]`, the lowest bit first.
    """
    copy = torch.empty(len(which), vocab_size, device=logits.device)
    grid = (len(which), triton.cdiv(vocab_size, _BLOCK))
    _copy_kernel[grid](logits, row_stride(logits), vocab_size, which, masks, copy, _BLOCK)
    return copy


def edit(copy: Tensor, place: Tensor, change: Tensor, first: int, count: int) -> None:
    """Change logits in place, each by one of the edits [first, first + count). One launch.

    Args:
        copy: float32, contiguous.
        place: int64 `[n]`: index into the flat copy, no two alike among the edits of a call.
        change: float32 `[n, 3]`: a bias that is added (-infinity: the token cannot come whatever its logit), then a
            penalty that divides a positive logit and multiplies another, then what is subtracted.
    """
    if count:
        _edit_kernel[(triton.cdiv(count, _EDITS),)](copy, place, change, first, count, _EDITS)


def score(logits: Tensor, vocab_size: int, which: Tensor, targets: Tensor, most: int, *, gathered: bool) -> Tensor:
    """int32 `[S, 4 + 2 * most]`, a line per row: target, rank, bits of its float32 log probability, bits of the log of
    the row's total, ids of the `most` largest logits, bits of their log probabilities; best first.

    Three launches, and torch's top-k if `most` is not 0.

    Args:
        logits: `[R, >= vocab_size]`, unchanged. The rows meant are `which[:, 0]`: any if `gathered`, else all in order.
        which: int32 `[S, 4]`.
        targets: int32 `[R]`. Below 0 means that there is none; the scores of such a row mean nothing.
    """
    peaks, masses = survey(logits, vocab_size, which, None, mass=True)
    rows, granules = peaks.shape
    tiles = triton.cdiv(vocab_size, _BLOCK)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    stride = row_stride(logits)
    _rank_kernel[(rows, tiles)](logits, stride, vocab_size, which, targets, counts, _BLOCK)
    scores = torch.empty(rows, 4 + 2 * most, dtype=torch.int32, device=logits.device)
    _score_kernel[(rows,)](
        logits, stride, vocab_size, which, targets, peaks, masses, counts, tiles, scores, scores.shape[1], granules,
        GRANULE,
    )  # fmt: skip
    if most:
        _add_top(logits[:, :vocab_size], which[:, 0] if gathered else None, scores, most)
    return scores


def _add_top(logits: Tensor, rows: Tensor | None, scores: Tensor, most: int) -> None:
    """The columns of `scores` for the largest logits, some rows at a time if they have to be copied for it."""
    floats = scores.view(torch.float32)
    at_once = max(1, _TOP_BYTES // (logits.shape[1] * logits.itemsize))
    for start in range(0, len(scores), at_once):
        part = slice(start, start + at_once)
        values, ids = (logits[part] if rows is None else logits.index_select(0, rows[part])).topk(most)
        scores[part, 4 : 4 + most] = ids
        floats[part, 4 + most :] = values.float() - floats[part, 3:4]
