"""One token per sequence of a causal convolution, on the saved inputs where they lie."""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.views import VECTOR_BYTES, stride

CHANNELS = 512
"""Per program: a vector of 16 bytes per thread at four bytes an element."""


@triton.jit(do_not_specialize=["p_pages", "p_fresh", "p_tokens", "page_vectors"])
def _conv_kernel(
    p_state: tl.tensor,
    p_pages: tl.tensor,
    p_fresh: tl.tensor,
    p_tokens: tl.tensor,
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    x_token: tl.int64,
    out_token: tl.int64,
    page_vectors: tl.int32,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    i_lane = tl.program_id(1)
    page = tl.load(p_pages + i_lane).to(tl.int64)
    token = tl.load(p_tokens + i_lane).to(tl.int64)
    o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = o_channel < CHANNELS
    p_row = p_out + token * out_token + o_channel
    if page != 0:
        known = o_channel < CHANNELS * (1 - tl.load(p_fresh + i_lane).to(tl.int32))
        # The factor VECTOR tells the compiler how wide it may load.
        p_rows = p_state + page * page_vectors * VECTOR + o_channel
        p_taps = p_weight + o_channel * WIDTH
        b_x = tl.load(p_x + token * x_token + o_channel, mask=inside, other=0.0)
        b_out = b_x.to(tl.float32) * tl.load(p_taps + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            b_out += tl.load(p_bias + o_channel, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(WIDTH - 1):
            b_old = tl.load(p_rows + k * CHANNELS, mask=known, other=0.0)
            b_out += b_old.to(tl.float32) * tl.load(p_taps + k, mask=inside, other=0.0).to(tl.float32)
            if k > 0:
                tl.store(p_rows + (k - 1) * CHANNELS, b_old, mask=inside)
        tl.store(p_rows + (WIDTH - 2) * CHANNELS, b_x.to(p_state.dtype.element_ty), mask=inside)
        tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=inside)
    else:
        tl.store(p_row, tl.zeros([BLOCK_C], p_out.dtype.element_ty), mask=inside)


def causal_conv_decode(
    view: Tensor,
    pages: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """`causal_conv` of n sequences with one token each, with fp32 sums.

    Args:
        view: `[pages, K - 1, C]` over the arena, changed in place; K is 2 or more.
        pages, fresh, tokens: as in `isthmus.kernels.gated_delta_decode.gated_delta_decode`.
        x: `[T, C]`, unit last stride.
        weight: `[C, K]`, contiguous.
        bias: `[C]`.
        out: `[T, C]`, unit last stride, written at `tokens`.
    """
    channels, width = weight.shape
    assert view.shape[1:] == (width - 1, channels), "a row per input that is kept"
    assert weight.is_contiguous(), "taps of a channel lie together"
    page_bytes = view.stride(0) * view.itemsize
    assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
    if len(pages) == 0:
        return
    _conv_kernel[(triton.cdiv(channels, CHANNELS), len(pages))](
        view,
        pages,
        fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh,
        tokens,
        x,
        weight,
        x if bias is None else bias,
        out,
        stride(x, 0),
        stride(out, 0),
        page_bytes // VECTOR_BYTES,
        WIDTH=width,
        CHANNELS=channels,
        BIAS=bias is not None,
        VECTOR=VECTOR_BYTES // view.itemsize,
        BLOCK_C=min(CHANNELS, triton.next_power_of_2(channels)),
        num_warps=4,
    )
