"""Paged attention on a GPU: decode and prefill over strided views of the arena (Triton).

Who reads what is planned on the host (`kernels/plan.py`) and carried in small integer tensors, so launches need
nothing from the device. No call allocates or synchronises: all of them can be captured in a CUDA graph, and a graph
of `decode_attention` serves any lengths, because each program reads on the device which items are its own.

A layer's kernels are specialised by head counts and sizes, page size, dtypes, how far relative scores reach, and
whether there is a soft cap, a sink, or (prefill) a window or chunks; never by lengths, batch sizes, or the window's
size. Inputs of a layer should keep their strides' and addresses' alignment to 16 elements and 16 bytes from step to
step: that is compiled in too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from isthmus.kernels.attention_decode import decode_kernel
from isthmus.kernels.attention_prefill import prefill_kernel
from isthmus.kernels.plan import FIELDS
from isthmus.kernels.reference import Scoring
from isthmus.kernels.views import Pages, stride
from isthmus.kernels.write_kv import write_kv

__all__ = [
    "DecodeConfig",
    "DecodeItems",
    "PrefillConfig",
    "PrefillTiles",
    "Workspace",
    "decode_attention",
    "decode_config",
    "head_tiles",
    "prefill_attention",
    "prefill_config",
    "prefill_tile",
    "write_kv",
]


class DecodeConfig(NamedTuple):
    """How a decode kernel is built."""

    block_n: int  # keys at a time
    num_warps: int
    num_stages: int  # num_stages - 1 blocks of K and V are in flight


class PrefillConfig(NamedTuple):
    """How a prefill kernel is built."""

    block_m: int  # query heads x queries at a time
    block_n: int  # keys at a time
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeItems:
    """The work of one decode launch, on the device: see `plan_decode`."""

    items: Tensor  # int32 [capacity, 8], contiguous
    bounds: Tensor  # int32 [programs of a KV head + 1], contiguous: where each one's items begin


@dataclass(frozen=True)
class PrefillTiles:
    """The work of one prefill launch: see `plan_prefill`."""

    tiles: Tensor  # int32 [n, 8] on the device, contiguous
    block: int  # queries of a tile, as planned
    window: int | None = None  # a query sees itself and window - 1 tokens before it
    chunked: bool = False  # rather, what comes from the last multiple of the window on


@dataclass(frozen=True)
class Workspace:
    """Where decode items of one sequence meet. Layers share it, one launch after the other on one stream."""

    rows: Tensor  # fp32 [most_items * heads * v_dim]: weighted value rows of a part
    stats: Tensor  # fp32 [most_items * heads * 2]: its maxima, its sums
    counters: Tensor  # int32 [most_items * heads]: parts that have arrived; all 0 between launches

    @classmethod
    def of(cls, most_items: int, heads: int, v_dim: int, device: torch.device | str) -> Workspace:
        """Room for `most_items` items of any layer with at most so many query heads and value dims."""
        rows = torch.empty(most_items * heads * v_dim, dtype=torch.float32, device=device)
        stats = torch.empty(most_items * heads * 2, dtype=torch.float32, device=device)
        return cls(rows, stats, torch.zeros(most_items * heads, dtype=torch.int32, device=device))

    def holds(self, items: int, heads: int, v_dim: int) -> bool:
        """Whether so many parts of such a layer fit."""
        return items * heads * v_dim <= self.rows.numel() and items * heads <= self.counters.numel()


_ACCUMULATED = 16384
"""Numbers of a program's outputs in fp32, at most: 64 registers of each of 256 threads."""


def head_tiles(group: int, v_dim: int) -> int:
    """Among how many programs the `group` query heads of one KV head are shared out, each with as many."""
    most = max(16, _ACCUMULATED // triton.next_power_of_2(v_dim))
    return next(tiles for tiles in range(1, group + 1) if group % tiles == 0 and group // tiles <= most)


def decode_config(k_dim: int, v_dim: int, itemsize: int, *, shared: bool = False) -> DecodeConfig:
    """The build for head sizes and the bytes of a page's element: about 32 KiB of K and V per block.

    shared: values are the first elements of the keys, so that a block serves twice (576 + 512: not measured).
    """
    if shared:
        row_bytes = (triton.next_power_of_2(v_dim) + triton.next_power_of_2(max(1, k_dim - v_dim))) * itemsize
        return DecodeConfig(min(64, max(16, 1 << ((49152 // row_bytes).bit_length() - 1))), 8, 3)
    row_bytes = (triton.next_power_of_2(k_dim) + triton.next_power_of_2(v_dim)) * itemsize
    block_n = min(128, max(16, 1 << ((32768 // row_bytes).bit_length() - 1)))
    # Rows that must be widened need the registers of more warps.
    num_warps = 8 if itemsize == 1 and k_dim + v_dim > 256 else 4
    return DecodeConfig(block_n, num_warps, 4 if k_dim + v_dim < 512 else 3)  # measured for 256 + 256 alone


def prefill_config(k_dim: int, v_dim: int, itemsize: int) -> PrefillConfig:
    """The build for head sizes and the bytes of an activation's element."""
    wide = triton.next_power_of_2(max(k_dim, v_dim))
    if itemsize > 2:
        return PrefillConfig(16, 16, 4, 2)
    if wide <= 64:
        return PrefillConfig(128, 64, 4, 3)
    if wide <= 128:
        return PrefillConfig(128, 64, 8, 3)
    return PrefillConfig(128, 32, 8, 3) if wide <= 256 else PrefillConfig(64, 32, 8, 2)


def prefill_tile(group: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """Queries per tile to plan with, for `group` query heads per KV head."""
    return max(1, prefill_config(k_dim, v_dim, itemsize).block_m // (group // head_tiles(group, v_dim)))


def decode_attention(
    query: Tensor,
    out: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    plan: DecodeItems,
    workspace: Workspace,
    how: Scoring,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: DecodeConfig | None = None,
) -> None:
    """One query token per sequence over its cached tokens, its own row among them; writes `out` at the plan's tokens.

    query `[T, heads, k_dim]` and out `[T, heads, v_dim]`, unit last stride; pages as in `Pages`; `page_table` int32
    `[rows, columns]`, unit last stride, valid where the plan reads. The plan's programs are those of one KV head, or
    tile of its query heads: together, a multiple of the GPU's multiprocessors. fp8 pages hold rows divided by `k_scale`
    and `v_scale`; by `k_scale` alone where values are the first elements of keys.
    """
    pages = Pages.of(key_pages, value_pages)
    heads = query.shape[1]
    _check(plan.items, heads, pages)
    assert workspace.holds(len(plan.items), heads, pages.v_dim), "the workspace is for fewer items or smaller layers"
    tiles = head_tiles(heads // pages.kv_heads, pages.v_dim)
    group = heads // pages.kv_heads // tiles
    block_n, num_warps, num_stages = config or decode_config(
        pages.k_dim, pages.v_dim, key_pages.itemsize, shared=pages.shared
    )
    relative = _Relative.of(how, query)
    tail = pages.k_dim - pages.v_dim if pages.shared else 0
    decode_kernel[((len(plan.bounds) - 1) * pages.kv_heads * tiles,)](
        query,
        out,
        key_pages,
        value_pages,
        page_table,
        plan.items,
        plan.bounds,
        workspace.rows,
        workspace.stats,
        workspace.counters,
        how.sinks,
        how.relative,
        how.scaling * k_scale,
        how.softcap or 0.0,
        k_scale if pages.shared else v_scale,
        relative.token,
        relative.head,
        stride(query, 0),
        stride(query, 1),
        stride(out, 0),
        stride(out, 1),
        page_table.stride(0),
        pages.page_vectors,
        KV_HEADS=pages.kv_heads,
        TILES=tiles,
        GROUP=group,
        K_DIM=pages.k_dim,
        V_DIM=pages.v_dim,
        TAIL=tail,
        PAGE_SIZE=pages.page_size,
        VECTOR=pages.vector,
        SHARED=pages.shared,
        SOFTCAP=how.softcap is not None,
        SINKS=how.sinks is not None,
        DISTANCES=relative.distances,
        PRECISION=_precision(query),
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(pages.k_dim - tail),
        BLOCK_V=triton.next_power_of_2(pages.v_dim),
        BLOCK_T=max(16, triton.next_power_of_2(tail)),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def prefill_attention(
    query: Tensor,
    out: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    plan: PrefillTiles,
    how: Scoring,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: PrefillConfig | None = None,
) -> None:
    """The chunks of a step over their cached tokens, then over their own rows; writes `out` at the chunks' tokens.

    key `[T, kv_heads, k_dim]` and value `[T, kv_heads, v_dim]` are the step's own rows, unit last stride, not scaled;
    the rest as in `decode_attention`. The page table is valid for the cached tokens that a chunk's queries see.
    """
    if len(plan.tiles) == 0:
        return
    pages = Pages.of(key_pages, value_pages)
    _check(plan.tiles, query.shape[1], pages)
    tiles = head_tiles(query.shape[1] // pages.kv_heads, pages.v_dim)
    group = query.shape[1] // pages.kv_heads // tiles
    block_m, block_n, num_warps, num_stages = config or prefill_config(pages.k_dim, pages.v_dim, query.itemsize)
    relative = _Relative.of(how, query)
    tail = pages.k_dim - pages.v_dim if pages.shared else 0
    prefill_kernel[(len(plan.tiles) * pages.kv_heads * tiles,)](
        query,
        out,
        key,
        value,
        key_pages,
        value_pages,
        page_table,
        plan.tiles,
        how.sinks,
        how.relative,
        how.scaling,
        how.softcap or 0.0,
        k_scale,
        k_scale if pages.shared else v_scale,
        relative.token,
        relative.head,
        stride(query, 0),
        stride(query, 1),
        stride(out, 0),
        stride(out, 1),
        stride(key, 0),
        stride(key, 1),
        stride(value, 0),
        stride(value, 1),
        page_table.stride(0),
        pages.page_vectors,
        plan.window or 0,
        KV_HEADS=pages.kv_heads,
        TILES=tiles,
        GROUP=group,
        K_DIM=pages.k_dim,
        V_DIM=pages.v_dim,
        TAIL=tail,
        PAGE_SIZE=pages.page_size,
        VECTOR=pages.vector,
        LIMIT=pages.limit,
        SHARED=pages.shared,
        WINDOW=plan.window is not None,
        CHUNKED=plan.chunked,
        SOFTCAP=how.softcap is not None,
        SINKS=how.sinks is not None,
        DISTANCES=relative.distances,
        PRECISION=_precision(query),
        BLOCK_Q=plan.block,
        BLOCK_M=max(block_m, triton.next_power_of_2(plan.block * group)),
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(pages.k_dim - tail),
        BLOCK_V=triton.next_power_of_2(pages.v_dim),
        BLOCK_T=max(16, triton.next_power_of_2(tail)),
        num_warps=num_warps,
        num_stages=num_stages,
    )


class _Relative(NamedTuple):
    """Strides of relative scores, and how many distances they have; 0 without."""

    token: int
    head: int
    distances: int

    @classmethod
    def of(cls, how: Scoring, query: Tensor) -> _Relative:
        if how.relative is None:
            return cls(0, 0, 0)
        assert how.relative.shape[:2] == query.shape[:2], "a row of relative scores for every token and head"
        assert how.relative.stride(2) == 1, "scores of a row lie together"
        return cls(stride(how.relative, 0), stride(how.relative, 1), how.relative.shape[2])


def _check(work: Tensor, heads: int, pages: Pages) -> None:
    assert work.is_contiguous(), "programs take their work by rows"
    assert work.shape[1] == FIELDS, "not a plan's rows"
    assert heads % pages.kv_heads == 0, "query heads are whole groups"


def _precision(query: Tensor) -> str:
    """Of the products: fp32 stays fp32; narrower types have no choice."""
    return "ieee" if query.dtype == torch.float32 else "tf32"
