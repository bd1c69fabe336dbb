"""One token per sequence of the real-gated linear recurrent unit, on the states where they lie."""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.views import VECTOR_BYTES, stride


class Tile(NamedTuple):
    """How the kernel is built."""

    channels: int  # per program
    num_warps: int


TILE = Tile(512, 4)
"""A vector of 16 bytes per thread at four bytes an element."""


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_tokens", "page_vectors"])
def _rglru_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_tokens: tl.tensor,
    p_x: tl.tensor,
    p_decay: tl.tensor,
    p_out: tl.tensor,
    x_token: tl.int64,
    decay_token: tl.int64,
    out_token: tl.int64,
    page_vectors: tl.int32,
    CHANNELS: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    i_lane = tl.program_id(1)
    page = tl.load(p_pages + i_lane).to(tl.int64)
    fresh = tl.load(p_fresh + i_lane).to(tl.int32)
    token = tl.load(p_tokens + i_lane).to(tl.int64)
    o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = o_channel < CHANNELS
    p_row = p_out + token * out_token + o_channel
    known = o_channel < tl.where(page != 0, CHANNELS * (1 - fresh), 0)
    # The factor VECTOR tells the compiler how wide it may load.
    p_own = p_state + page * page_vectors * VECTOR + o_channel
    b_state = tl.load(p_own, mask=known, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    if page != 0:
        b_decay = tl.load(p_decay + token * decay_token + o_channel, mask=inside, other=0.0).to(tl.float32)
        b_x = tl.load(p_x + token * x_token + o_channel, mask=inside, other=0.0).to(tl.float32)
        # An approximate exponential may exceed 1, whose difference has no root.
        b_gain = tl.sqrt(tl.maximum(1.0 - tl.exp(2.0 * b_decay), 0.0))
        b_state = b_state * tl.exp(b_decay) + tl.where(known, b_gain, 1.0) * b_x
        tl.store(p_own, b_state.to(p_state.dtype.element_ty), mask=inside)
        tl.store(p_row, b_state.to(p_out.dtype.element_ty), mask=inside)
    else:
        tl.store(p_row, tl.zeros([BLOCK_C], p_out.dtype.element_ty), mask=inside)


def rglru_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    x: Tensor,
    decay: Tensor,
    out: Tensor,
    *,
    tile: Tile = TILE,
    early: bool,
) -> None:
    """`isthmus.kernels.rglru.rglru` of n sequences with one token each.

    Args:
        view: `[pages, C]` over the arena, changed in place.
        pages, fresh, tokens, early: as in `isthmus.kernels.gated_delta_decode.gated_delta_decode`; where the state is
            zero the token is the sequence's first, and enters as it is.
        x, decay: `[T, C]`, unit last stride.
        out: `[T, C]`, unit last stride, written at `tokens`.
    """
    channels = view.shape[1]
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    assert all(t.stride(1) == 1 or channels == 1 for t in (x, decay, out)), "channels of a token are contiguous"
    if len(pages) == 0:
        return
    _rglru_kernel[(triton.cdiv(channels, tile.channels), len(pages))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        tokens,
        *(x, decay, out),
        *(stride(t, 0) for t in (x, decay, out)),
        page_bytes // VECTOR_BYTES,
        CHANNELS=channels,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_C=min(tile.channels, triton.next_power_of_2(channels)),
        num_warps=tile.num_warps,
        **dependent_launch(early),
    )
