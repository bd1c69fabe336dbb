"""Rows of K and V into their pages: one launch for both, converting to the pages' dtype."""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.dependent import dependent_launch, let_next, wait_for_previous
from isthmus.kernels.views import Pages, stride

ELEMENTS = 2048
"""Of K per program: four vectors of 16 bytes per thread at two bytes an element."""


@triton.jit
def to_page(b_rows: tl.tensor, scale: tl.float32, DTYPE: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Rows as pages hold them. LIMIT is the largest fp8 number, past which values stay there; 0 for wider dtypes."""
    if LIMIT > 0:
        b_scaled = b_rows.to(tl.float32) / scale
        return tl.minimum(tl.maximum(b_scaled, -LIMIT), LIMIT).to(DTYPE)
    else:
        return b_rows.to(DTYPE)


@triton.jit(do_not_specialize=["p_slots", "tokens", "page_vectors"])
def _write_kernel(
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_key_pages: tl.tensor,
    p_value_pages: tl.tensor,
    p_slots: tl.tensor,
    k_scale: tl.float32,
    v_scale: tl.float32,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    tokens: tl.int32,
    page_vectors: tl.int32,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    VALUES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_token = (o_row // KV_HEADS).to(tl.int64)
    o_head = o_row % KV_HEADS
    b_slot = tl.load(p_slots + o_token, mask=o_token < tokens, other=-1)
    written = (b_slot >= 0)[:, None]
    b_page = b_slot // PAGE_SIZE * page_vectors * VECTOR
    b_place = b_slot % PAGE_SIZE * KV_HEADS + o_head
    wait_for_previous(DEPENDENT)
    o_key = tl.arange(0, BLOCK_K)
    p_from = p_key + o_token[:, None] * key_token + o_head[:, None] * key_head + o_key[None, :]
    inside_key = written & (o_key < K_DIM)[None, :]
    b_key = tl.load(p_from, mask=inside_key)
    if VALUES:
        o_value = tl.arange(0, BLOCK_V)
        p_from = p_value + o_token[:, None] * value_token + o_head[:, None] * value_head + o_value[None, :]
        inside_value = written & (o_value < V_DIM)[None, :]
        b_value = tl.load(p_from, mask=inside_value)
    p_to = p_key_pages + (b_page + b_place * K_DIM)[:, None] + o_key[None, :]
    tl.store(p_to, to_page(b_key, k_scale, p_key_pages.dtype.element_ty, LIMIT), mask=inside_key)
    if VALUES:
        p_to = p_value_pages + (b_page + b_place * V_DIM)[:, None] + o_value[None, :]
        tl.store(p_to, to_page(b_value, v_scale, p_value_pages.dtype.element_ty, LIMIT), mask=inside_value)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    early: bool,
) -> None:
    """Put every token's rows into its slot.

    key `[T, kv_heads, k_dim]` and value `[T, kv_heads, v_dim]`, unit last stride; `slots` int64 `[T]`, page *
    page_size + offset, -1 for a token that is not written; pages as in `Pages`. fp8 pages hold row / scale,
    saturated. Where values are the first elements of the keys, keys alone are written.

    early: it may begin before the kernel before it has ended, and slots are read then (`isthmus.kernels.dependent`):
    between what writes them and this lies an ordinary launch.
    """
    pages = Pages.of(key_pages, value_pages)
    tokens = key.shape[0]
    assert value.shape[0] == tokens, "a V row per K row"
    assert slots.shape == (tokens,), "one slot per token"
    if tokens == 0:
        return
    block_k = triton.next_power_of_2(pages.k_dim)
    rows = max(1, ELEMENTS // block_k)
    _write_kernel[(triton.cdiv(tokens * pages.kv_heads, rows),)](
        key,
        value,
        key_pages,
        value_pages,
        slots,
        k_scale,
        v_scale,
        stride(key, 0),
        stride(key, 1),
        stride(value, 0),
        stride(value, 1),
        tokens,
        pages.page_vectors,
        KV_HEADS=pages.kv_heads,
        K_DIM=pages.k_dim,
        V_DIM=pages.v_dim,
        PAGE_SIZE=pages.page_size,
        VECTOR=pages.vector,
        LIMIT=pages.limit,
        VALUES=not pages.shared,
        BLOCK_R=rows,
        BLOCK_K=block_k,
        BLOCK_V=triton.next_power_of_2(pages.v_dim),
        num_warps=4,
        **dependent_launch(early),
    )
