"""Paged attention on a GPU: decode and prefill over strided views of the arena (Triton).

Who reads what is planned on the host (`kernels/plan.py`) and carried in small integer tensors, so launches need
nothing from the device. No call allocates or synchronises: all of them can be captured in a CUDA graph, which then
serves any lengths, because each program reads on the device what is its own.

A layer's kernels are specialised by head counts and sizes, page size, dtypes, how far relative scores reach, and
whether there is a soft cap, a sink, or (prefill) a window or chunks; never by lengths, batch sizes, or the window's
size. Inputs of a layer should keep their strides' and addresses' alignment to 16 elements and 16 bytes from step to
step: that is compiled in too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.kernels.attention_decode import decode_kernel
from isthmus.kernels.attention_prefill import MERGERS, merge_kernel, prefill_kernel
from isthmus.kernels.dependent import dependent_launch
from isthmus.kernels.device import HOPPER, shared_bytes
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
    "prefill_programs",
    "prefill_rows",
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
    slots: int  # parts are among the first so many
    window: int | None = None  # a query sees itself and window - 1 tokens before it
    chunked: bool = False  # rather, what comes from the last multiple of the window on


@dataclass(frozen=True)
class Workspace:
    """Where the parts of a sequence or of a tile meet. Layers share it, one launch after the other on one stream."""

    rows: Tensor  # fp32 [rows * v_dim]: weighted value rows of a part
    stats: Tensor  # fp32 [rows * 2]: its maxima, its sums
    counters: Tensor  # int32 [rows]: parts of decodes that have arrived; all 0 between launches

    @classmethod
    def of(cls, most_items: int, heads: int, v_dim: int, device: torch.device | str) -> Workspace:
        """Room for `most_items` items of decodes, of any layer with at most so many query heads and value dims."""
        return cls.holding([(most_items * heads, v_dim)], device)

    @classmethod
    def holding(cls, launches: Iterable[tuple[int, int]], device: torch.device | str) -> Workspace:
        """Room for any of these launches, one at a time: (rows of all its parts, value dims)."""
        launches = list(launches)
        most = max((rows for rows, _ in launches), default=0)
        numbers = max((rows * v_dim for rows, v_dim in launches), default=0)
        stats = torch.empty(most * 2, dtype=torch.float32, device=device)
        counters = torch.zeros(most, dtype=torch.int32, device=device)
        return cls(torch.empty(numbers, dtype=torch.float32, device=device), stats, counters)

    def holds(self, rows: int, v_dim: int) -> bool:
        """Whether so many rows of parts of such a layer fit."""
        return rows * v_dim <= self.rows.numel() and rows <= self.counters.numel()


FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
"""What Triton calls them."""

_ACCUMULATED = 16384
"""Numbers of a program's outputs in fp32, at most: 64 registers of each of 256 threads."""

_AMPLE = 128 << 10
"""Bytes of shared memory without which builds are smaller."""

_PREFILL_WARPS = 8
"""Warps of prefill programs that a multiprocessor runs at a time: they take 180 to 255 registers of a thread, all it
has. So 1 program of heads wider than 64, and 2 of others."""


def head_tiles(group: int, v_dim: int) -> int:
    """Among how many programs the `group` query heads of one KV head are shared out, each with as many."""
    most = max(16, _ACCUMULATED // triton.next_power_of_2(v_dim))
    return next(tiles for tiles in range(1, group + 1) if group % tiles == 0 and group // tiles <= most)


def decode_config(k_dim: int, v_dim: int, itemsize: int, *, shared: bool = False) -> DecodeConfig:
    """The build for head sizes and the bytes of a page's element: about 32 KiB of K and V per block, fewer of them in
    flight where they would not fit.

    shared: values are the first elements of the keys, so that a block serves twice (576 + 512: not measured).
    """
    tight = shared_bytes() < _AMPLE
    if shared:
        row_bytes = (triton.next_power_of_2(v_dim) + triton.next_power_of_2(max(1, k_dim - v_dim))) * itemsize
        block_n = max(16, 1 << ((49152 // row_bytes).bit_length() - 1))
        if tight:
            return DecodeConfig(min(32, block_n), 8, 1 if itemsize > 2 else 2)
        return DecodeConfig(min(64, block_n), 8, 3)
    row_bytes = (triton.next_power_of_2(k_dim) + triton.next_power_of_2(v_dim)) * itemsize
    block_n = min(128, max(16, 1 << ((32768 // row_bytes).bit_length() - 1)))
    stages = 3 if tight or k_dim + v_dim >= 512 else 4  # measured for 256 + 256 alone
    return DecodeConfig(block_n, 4, 1 if tight and itemsize > 2 else stages)


def prefill_config(k_dim: int, v_dim: int, itemsize: int, row_itemsize: int | None = None) -> PrefillConfig:
    """The build for head sizes, the bytes of an activation's element and, if known, of a page's.

    Smaller where it would not fit: those builds were never measured. Queries do not depend on pages, for planning.
    """
    wide, tight = triton.next_power_of_2(max(k_dim, v_dim)), shared_bytes() < _AMPLE
    if itemsize > 2:
        return PrefillConfig(16, 16, 4, 1 if tight else 2)
    if wide <= 64:
        found = PrefillConfig(128, 64, 4, 3)
    elif wide <= 128:
        found = PrefillConfig(128, 64, 8, 3)
    elif wide <= 256:
        found = PrefillConfig(64, 32, 4, 2) if tight else PrefillConfig(128, 32, 8, 3)
    else:
        found = PrefillConfig(32, 32, 4, 2) if tight else PrefillConfig(64, 32, 8, 2)
    narrow = row_itemsize is not None and row_itemsize < itemsize  # a block is there twice, as it lies and widened
    return found._replace(block_n=found.block_n // 2) if narrow and shared_bytes() < HOPPER else found


def prefill_tile(group: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """Queries per tile to plan with, for `group` query heads per KV head."""
    return max(1, prefill_config(k_dim, v_dim, itemsize).block_m // (group // head_tiles(group, v_dim)))


def prefill_programs(cores: int, kv_heads: int, group: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """How many tiles of a KV head, or of a tile of its query heads, `cores` multiprocessors work on at a time."""
    resident = max(1, _PREFILL_WARPS // prefill_config(k_dim, v_dim, itemsize).num_warps)
    return max(1, cores * resident // (kv_heads * head_tiles(group, v_dim)))


def prefill_rows(
    slots: int,
    block: int,
    kv_heads: int,
    group: int,
    k_dim: int,
    v_dim: int,
    itemsize: int,
    config: PrefillConfig | None = None,
) -> int:
    """Rows of a workspace that `slots` parts of tiles of `block` queries take, of all heads together."""
    tiles, config = head_tiles(group, v_dim), config or prefill_config(k_dim, v_dim, itemsize)
    return slots * kv_heads * tiles * _block_m(config.block_m, block, group // tiles)


def _block_m(least: int, queries: int, group: int) -> int:
    """Rows of a tile of so many queries, of `group` heads each."""
    return max(least, int(triton.next_power_of_2(queries * group)))


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
    early: bool,
) -> None:
    """One query token per sequence over its cached tokens, its own row among them; writes `out` at the plan's tokens.

    query `[T, heads, k_dim]` and out `[T, heads, v_dim]`, unit last stride; pages as in `Pages`; `page_table` int32
    `[rows, columns]`, unit last stride, valid where the plan reads. The plan's programs are those of one KV head, or
    tile of its query heads: together, a multiple of the GPU's multiprocessors. fp8 pages hold rows divided by `k_scale`
    and `v_scale`; by `k_scale` alone where values are the first elements of keys.

    early: it may begin before the kernel before it has ended, and the plan and the page table are read then
    (`isthmus.kernels.dependent`): between what writes them and this lies an ordinary launch.
    """
    pages = Pages.of(key_pages, value_pages)
    heads = query.shape[1]
    _check(plan.items, heads, pages)
    assert workspace.holds(len(plan.items) * heads, pages.v_dim), "the workspace is for fewer items or smaller layers"
    tiles = head_tiles(heads // pages.kv_heads, pages.v_dim)
    group = heads // pages.kv_heads // tiles
    block_n, num_warps, num_stages = config or decode_config(
        pages.k_dim, pages.v_dim, key_pages.itemsize, shared=pages.shared
    )
    relative = _Relative.of(how, query)
    tail = pages.k_dim - pages.v_dim if pages.shared else 0
    fp8, each = FP8.get(key_pages.dtype), 1
    if fp8 is not None:
        assert pages.k_dim % 2 == pages.v_dim % 2 == 0, "rows of fp8 are read two numbers at a time"
        key_pages, value_pages, each = key_pages.view(torch.uint16), value_pages.view(torch.uint16), 2
    k_words, v_words, tail_words = pages.k_dim // each, pages.v_dim // each, tail // each
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
        K_DIM=k_words,
        V_DIM=v_words,
        TAIL=tail_words,
        PAGE_SIZE=pages.page_size,
        VECTOR=pages.vector // each,
        SHARED=pages.shared,
        SOFTCAP=how.softcap is not None,
        SINKS=how.sinks is not None,
        DISTANCES=relative.distances,
        PRECISION=_precision(query),
        FP8=fp8,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_R=triton.next_power_of_2(group),
        BLOCK_N=block_n,
        BLOCK_K=max(16, triton.next_power_of_2(k_words - tail_words)),
        BLOCK_V=max(16, triton.next_power_of_2(v_words)),
        BLOCK_T=max(16, triton.next_power_of_2(tail_words)),
        num_warps=num_warps,
        num_stages=num_stages,
        **dependent_launch(early),
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
    workspace: Workspace,
    how: Scoring,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: PrefillConfig | None = None,
) -> None:
    """The chunks of a step over their cached tokens, then over their own rows; writes `out` at the chunks' tokens.

    key `[T, kv_heads, k_dim]` and value `[T, kv_heads, v_dim]` are the step's own rows, unit last stride, not scaled;
    the rest as in `decode_attention`. The page table is valid for the cached tokens that a chunk's queries see. A plan
    with slots is two launches, whether tiles are cut or not.
    """
    if len(plan.tiles) == 0:
        return
    pages = Pages.of(key_pages, value_pages)
    _check(plan.tiles, query.shape[1], pages)
    tiles = head_tiles(query.shape[1] // pages.kv_heads, pages.v_dim)
    group = query.shape[1] // pages.kv_heads // tiles
    block_m, block_n, num_warps, num_stages = config or prefill_config(
        pages.k_dim, pages.v_dim, query.itemsize, key_pages.itemsize
    )
    block_m = _block_m(block_m, plan.block, group)
    units, slots = pages.kv_heads * tiles, min(plan.slots, len(plan.tiles))
    assert workspace.holds(slots * units * block_m, pages.v_dim), "the workspace is for fewer parts or smaller layers"
    relative = _Relative.of(how, query)
    tail = pages.k_dim - pages.v_dim if pages.shared else 0
    v_scale = k_scale if pages.shared else v_scale
    prefill_kernel[(len(plan.tiles) * units,)](
        query,
        out,
        key,
        value,
        key_pages,
        value_pages,
        page_table,
        plan.tiles,
        workspace.rows,
        workspace.stats,
        how.sinks,
        how.relative,
        how.scaling,
        how.softcap or 0.0,
        k_scale,
        v_scale,
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
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(pages.k_dim - tail),
        BLOCK_V=triton.next_power_of_2(pages.v_dim),
        BLOCK_T=max(16, triton.next_power_of_2(tail)),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if slots == 0:
        return
    merge_kernel[(slots * units, MERGERS)](
        out,
        plan.tiles,
        workspace.rows,
        workspace.stats,
        how.sinks,
        v_scale,
        stride(out, 0),
        stride(out, 1),
        UNITS=units,
        GROUP=group,
        V_DIM=pages.v_dim,
        SINKS=how.sinks is not None,
        BLOCK_Q=plan.block,
        BLOCK_M=block_m,
        BLOCK_V=triton.next_power_of_2(pages.v_dim),
        num_warps=4,
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
