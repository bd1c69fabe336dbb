"""Logits to tokens on a GPU, as Triton kernels: what `isthmus.engine.draw` means, without a number read by the host.

    survey   (rows x tiles programs)  per granule of 256 tokens the largest key and the mass, in one pass
    choose   (a program per row)      a token, from the survey and the few granules that matter

The k-th largest granule peak bounds the k-th largest logit from
below, and top-p keeps nothing so light that a whole vocabulary of it were less than the share it drops; so thresholds
leave few granules, and what they may keep is gathered into a short list of candidates (at most 8,192; a row with more
is read as a whole). A threshold is found by a search over keys, four ways at a time: counts for top-k, masses for
top-p. Only a row that has a parameter pays for its passes, and a row's token depends on its own logits and number
alone: all sums are per row and in a fixed order.

Everything is queued on the current stream. Widths and strides are compiled in as far as their alignment goes: they
are constants of a model.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.survey import (
    GRANULE,
    INFINITE,
    LOWEST,
    NOTHING,
    TILE_GRANULES,
    key_of,
    row_stride,
    survey,
    value_of,
)

CANDIDATES = 8192
"""Most tokens of a row that are gathered."""

GREEDY = -1
"""In the place of a top-k: take the first maximum."""

_DROPPED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # the same in all keys of a dtype


@triton.jit
def _whole(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The int32 key that was cut to its upper bits: the others are those of its sign."""
    key = key.to(tl.int32)
    return (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)


@triton.jit
def _weight(b_x: tl.tensor, top: tl.tensor, scale: tl.tensor, floor: tl.tensor) -> tl.tensor:
    return tl.where(b_x >= floor, tl.exp((b_x - top) * scale), 0.0)


@triton.jit
def _first_maximum(
    p_row: tl.tensor, width: tl.int32, b_peak: tl.tensor, top: tl.tensor, GRANULES: tl.constexpr, GRANULE: tl.constexpr
) -> tl.tensor:
    """int32: the first token whose key is `top`, from the peaks of all granules."""
    granule = tl.min(tl.where(b_peak == top, tl.arange(0, GRANULES), GRANULES - 1), 0)
    o_tokens = granule * GRANULE + tl.arange(0, GRANULE)
    b_x = tl.load(p_row + o_tokens, mask=o_tokens < width, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where(key_of(b_x) == top, o_tokens, width), 0)


@triton.jit
def _greedy_kernel(
    p_logits: tl.tensor,
    stride: tl.int64,
    width: tl.int32,
    p_peaks: tl.tensor,
    p_tokens: tl.tensor,
    GRANULES: tl.constexpr,
    GRANULE: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    o_granules = tl.arange(0, GRANULES)
    inside = o_granules < tl.cdiv(width, GRANULE)
    b_peak = tl.load(p_peaks + i_row * GRANULES + o_granules, mask=inside, other=NOTHING)
    top = tl.max(b_peak, 0)
    token = _first_maximum(p_logits + i_row * stride, width, b_peak, top, GRANULES, GRANULE)
    tl.store(p_tokens + i_row, tl.where((top > LOWEST) & (top < INFINITE), token, -1))


@triton.jit
def _first_above(b_weight: tl.tensor, b_sum: tl.tensor, target: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """First index that adds weight where the running sum passes the target; where rounding leaves none, the last."""
    o_all = tl.arange(0, SIZE)
    first = tl.min(tl.where((b_sum > target) & (b_weight > 0), o_all, SIZE), 0)
    return tl.minimum(first, tl.max(tl.where(b_weight > 0, o_all, 0), 0))


@triton.jit
def _invert(
    p_row: tl.tensor,
    n: tl.int32,
    b_mass: tl.tensor,
    number: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    floor: tl.tensor,
    GRANULES: tl.constexpr,
    GRANULE: tl.constexpr,
) -> tl.tensor:
    """int32: the index among `n` where the running weight passes `number` of the total, from all granules' masses."""
    b_sum = tl.cumsum(b_mass.to(tl.float64), 0)
    target = number * tl.max(b_sum, 0)
    granule = _first_above(b_mass, b_sum, target, GRANULES)
    before = tl.max(tl.where(tl.arange(0, GRANULES) < granule, b_sum, 0.0), 0)
    o_inside = granule * GRANULE + tl.arange(0, GRANULE)
    b_x = tl.load(p_row + o_inside, mask=o_inside < n, other=-float("inf")).to(tl.float32)
    b_weight = _weight(b_x, top, scale, floor)
    return granule * GRANULE + _first_above(b_weight, tl.cumsum(b_weight.to(tl.float64), 0), target - before, GRANULE)


@triton.jit
def _kth_peak(b_peak: tl.tensor, k: tl.tensor, top: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The k-th largest key, cut; that of -infinity if there are fewer: int64."""
    b_cut = b_peak >> SHIFT
    low = (top * 0 + (LOWEST >> SHIFT)).to(tl.int64)
    high = (top >> SHIFT).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((b_cut >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _search(
    p_row: tl.tensor,
    n: tl.int32,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """The largest cut key in [low, high) from which entries are `goal` or weigh it together, `low` if none: int64."""
    while high - low > 1:
        step = (high - low + 3) >> 2
        at1 = (low + step).to(tl.int32)
        at2 = (low + 2 * step).to(tl.int32)
        at3 = (low + 3 * step).to(tl.int32)
        b_sum1 = tl.zeros([BLOCK], tl.float32)
        b_sum2 = tl.zeros([BLOCK], tl.float32)
        b_sum3 = tl.zeros([BLOCK], tl.float32)
        i_start = n * 0
        while i_start < n:
            o_entries = i_start + tl.arange(0, BLOCK)
            b_x = tl.load(p_row + o_entries, mask=o_entries < n, other=-float("inf")).to(tl.float32)
            b_cut = key_of(b_x) >> SHIFT
            b_add = tl.full([BLOCK], 1.0, tl.float32)
            if MASS:
                b_add = tl.exp((b_x - top) * scale)
            b_sum1 += tl.where(b_cut >= at1, b_add, 0.0)
            b_sum2 += tl.where(b_cut >= at2, b_add, 0.0)
            b_sum3 += tl.where(b_cut >= at3, b_add, 0.0)
            i_start += BLOCK
        enough1 = tl.sum(b_sum1.to(tl.float64), 0) >= goal
        enough2 = tl.sum(b_sum2.to(tl.float64), 0) >= goal
        enough3 = tl.sum(b_sum3.to(tl.float64), 0) >= goal
        end = tl.where(enough3, high, tl.where(enough2, low + 3 * step, tl.where(enough1, low + 2 * step, low + step)))
        low = tl.where(enough3, low + 3 * step, tl.where(enough2, low + 2 * step, tl.where(enough1, low + step, low)))
        high = tl.minimum(high, end)
    return low


@triton.jit
def _masses(
    p_row: tl.tensor,
    n: tl.int32,
    p_masses: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    floor: tl.tensor,
    GRANULES: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
) -> tl.tensor:
    """float32 `[GRANULES]`: what is kept of each granule of `n` entries. `p_masses` is overwritten."""
    tl.debug_barrier()  # other threads may still read the masses there
    i_granule = n * 0
    while i_granule < tl.cdiv(n, GRANULE):
        o_granules = i_granule + tl.arange(0, TILE)
        o_entries = o_granules[:, None] * GRANULE + tl.arange(0, GRANULE)[None, :]
        b_x = tl.load(p_row + o_entries, mask=o_entries < n, other=-float("inf")).to(tl.float32)
        tl.store(p_masses + o_granules, tl.sum(_weight(b_x, top, scale, floor), 1))
        i_granule += TILE
    tl.debug_barrier()
    o_granules = tl.arange(0, GRANULES)
    return tl.load(p_masses + o_granules, mask=o_granules < tl.cdiv(n, GRANULE), other=0.0)


@triton.jit
def _filter(
    p_row: tl.tensor,
    n: tl.int32,
    p_masses: tl.tensor,
    total: tl.tensor,
    floor: tl.tensor,
    top_key: tl.tensor,
    k: tl.tensor,
    scale: tl.tensor,
    share: tl.tensor,
    number: tl.tensor,
    GRANULES: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """int32: the index drawn among `n` entries. `total` is the mass that top-p is a share of, 0 if not known."""
    top = value_of(top_key)
    low = (key_of(floor) >> SHIFT).to(tl.int64)
    high = (top_key >> SHIFT).to(tl.int64) + 1
    if k > 0:
        low = _search(p_row, n, low, high, k.to(tl.float64), top, scale, False, TILE * GRANULE, SHIFT)
        floor = tl.maximum(floor, value_of(_whole(low, SHIFT)))
    if share < 1:
        if total == 0:
            b_mass = _masses(p_row, n, p_masses, top, scale, floor, GRANULES, TILE, GRANULE)
            total = tl.sum(b_mass.to(tl.float64), 0)
        low = _search(p_row, n, low, high, share * total, top, scale, True, TILE * GRANULE, SHIFT)
        floor = tl.maximum(floor, value_of(_whole(low, SHIFT)))
    b_mass = _masses(p_row, n, p_masses, top, scale, floor, GRANULES, TILE, GRANULE)
    return _invert(p_row, n, b_mass, number, top, scale, floor, GRANULES, GRANULE)


@triton.jit
def _gather(
    p_row: tl.tensor,
    width: tl.int32,
    b_peak: tl.tensor,
    floor: tl.tensor,
    p_live: tl.tensor,
    p_values: tl.tensor,
    p_ids: tl.tensor,
    GRANULES: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
    ROOM: tl.constexpr,
) -> tl.tensor:
    """int32: how many tokens are not below the floor; the first `ROOM` of them are written in token order."""
    b_live = (b_peak >= key_of(floor)).to(tl.int32)
    tl.store(p_live + tl.cumsum(b_live, 0) - 1, tl.arange(0, GRANULES), mask=b_live > 0)
    live = tl.sum(b_live, 0)
    tl.debug_barrier()
    count = live * 0
    i_live = live * 0
    while i_live < live:
        o_live = i_live + tl.arange(0, TILE)
        b_granule = tl.load(p_live + o_live, mask=o_live < live, other=GRANULES)  # past the row
        o_tokens = b_granule[:, None] * GRANULE + tl.arange(0, GRANULE)[None, :]
        b_x = tl.load(p_row + o_tokens, mask=o_tokens < width, other=-float("inf"))
        b_kept = (b_x.to(tl.float32) >= floor).to(tl.int32)
        b_counts = tl.sum(b_kept, 1)
        b_before = count + tl.cumsum(b_counts, 0) - b_counts
        o_places = b_before[:, None] + tl.cumsum(b_kept, 1) - 1
        fits = (b_kept > 0) & (o_places < ROOM)
        tl.store(p_values + o_places, b_x, mask=fits)
        tl.store(p_ids + o_places, o_tokens, mask=fits)
        count += tl.sum(b_counts, 0)
        i_live += TILE
    tl.debug_barrier()
    return count


@triton.jit
def _draw(
    p_row: tl.tensor,
    width: tl.int32,
    b_peak: tl.tensor,
    top_key: tl.tensor,
    k: tl.tensor,
    p_how: tl.tensor,
    p_masses: tl.tensor,
    p_live: tl.tensor,
    p_values: tl.tensor,
    p_ids: tl.tensor,
    GRANULES: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
    ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """int32: the token of a row with a finite maximum; the pointers are to what is the row's own."""
    scale = tl.load(p_how).to(tl.float32)
    depth = tl.load(p_how + 1).to(tl.float32)
    share = tl.load(p_how + 2)
    number = tl.load(p_how + 3)
    top = value_of(top_key)
    granules = tl.cdiv(width, GRANULE)
    o_granules = tl.arange(0, GRANULES)
    b_mass = tl.load(p_masses + o_granules, mask=o_granules < granules, other=0.0)
    b_mass *= tl.where(b_peak > LOWEST, tl.exp((value_of(b_peak) - top) * scale), 0.0)
    filtered = (k > 0) | (depth > -float("inf"))
    if filtered | (share < 1):
        total = tl.sum(b_mass.to(tl.float64), 0)
        floor = top + depth
        if filtered:
            total = total * 0
            if k > 0:
                floor = tl.maximum(floor, value_of(_whole(_kth_peak(b_peak, k, top_key, SHIFT), SHIFT)))
        else:
            light = 0.99 * (1 - share) * total / width  # tokens lighter than this are dropped, all of them
            floor = top + tl.log(light.to(tl.float32)) / scale
        count = granules * 0 + ROOM + 1
        if floor > -float("inf"):
            count = _gather(p_row, width, b_peak, floor, p_live, p_values, p_ids, GRANULES, TILE, GRANULE, ROOM)
        if count <= ROOM:
            index = _filter(
                p_values, count, p_masses, total, floor, top_key, k, scale, share, number,
                GRANULES, TILE, GRANULE, SHIFT,
            )  # fmt: skip
            token = tl.load(p_ids + index)
        else:
            token = _filter(
                p_row, width, p_masses, total, floor, top_key, k, scale, share, number, GRANULES, TILE, GRANULE, SHIFT
            )
    else:
        token = _invert(p_row, width, b_mass, number, top, scale, -float("inf"), GRANULES, GRANULE)
    return token


@triton.jit
def _choose_kernel(
    p_logits: tl.tensor,
    stride: tl.int64,
    width: tl.int32,
    p_which: tl.tensor,
    p_how: tl.tensor,
    p_peaks: tl.tensor,
    p_masses: tl.tensor,
    p_live: tl.tensor,
    p_values: tl.tensor,
    p_ids: tl.tensor,
    p_tokens: tl.tensor,
    GATHERED: tl.constexpr,
    GRANULES: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
    ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    row = tl.load(p_which + i_row * 4).to(tl.int64)
    k = tl.load(p_which + i_row * 4 + 1)
    p_row = p_logits + (row if GATHERED else i_row) * stride
    o_granules = i_row * GRANULES + tl.arange(0, GRANULES)
    inside = tl.arange(0, GRANULES) < tl.cdiv(width, GRANULE)
    b_peak = tl.load(p_peaks + o_granules, mask=inside, other=NOTHING)
    top = tl.max(b_peak, 0)
    token = k * 0 - 1
    if (top > LOWEST) & (top < INFINITE):
        if k == -1:
            token = _first_maximum(p_row, width, b_peak, top, GRANULES, GRANULE)
        else:
            token = _draw(
                p_row, width, b_peak, top, k, p_how + i_row * 4, p_masses + i_row * GRANULES,
                p_live + i_row * GRANULES, p_values + i_row * ROOM, p_ids + i_row * ROOM,
                GRANULES, TILE, GRANULE, ROOM, SHIFT,
            )  # fmt: skip
    tl.store(p_tokens + row, token)


def greedy(logits: Tensor, vocab_size: int) -> Tensor:
    """The first of the largest among the first `vocab_size` columns: `[R, >= vocab_size]` -> int32 [R].

    -1 where the maximum is NaN or infinite. Two launches, nothing from the host: a CUDA graph may capture it.
    """
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        peaks, _ = survey(logits, vocab_size, None, None, mass=False)
        _greedy_kernel[(len(logits),)](
            logits, row_stride(logits), vocab_size, peaks, tokens, peaks.shape[1], GRANULE, num_warps=4
        )
    return tokens


def choose(logits: Tensor, vocab_size: int, which: Tensor, how: Tensor, tokens: Tensor, *, gathered: bool) -> None:
    """Write one token for each row of `which` to `tokens`: greedy, or drawn at a uniform number. Two launches.

    Args:
        logits: `[R, >= vocab_size]`, unchanged. Row i of `which` means row `which[i, 0]` of them if `gathered`,
            else row i.
        which: int32 `[S, 4]`: place in `tokens`; top-k (0 = off, GREEDY); two more that are not read here.
        how: float64 `[S, 4]`: 1 / temperature; temperature * log(min-p), -infinity for off; top-p; a number in [0, 1).
        tokens: int32; -1 is written where the maximum is NaN or infinite.
    """
    peaks, masses = survey(logits, vocab_size, which if gathered else None, how, mass=True)
    rows, granules = peaks.shape
    live = torch.empty_like(peaks)
    values = torch.empty(rows, CANDIDATES, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    # 128 registers a thread let two programs share a multiprocessor, so 256 rows run at once on an H200.
    _choose_kernel[(rows,)](
        logits, row_stride(logits), vocab_size, which, how, peaks, masses, live, values, ids, tokens, gathered,
        granules, TILE_GRANULES, GRANULE, CANDIDATES, _DROPPED_BITS[logits.dtype], num_warps=8, maxnreg=128,
    )  # fmt: skip
