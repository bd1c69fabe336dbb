"""Sequences in an arena of NaN, the attention kernels over them, and dense attention in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tests.kernels.tile_parts import cut_all
from torch import Tensor

from isthmus.kernels.attention import (
    DecodeConfig,
    DecodeItems,
    PrefillConfig,
    PrefillTiles,
    Workspace,
    decode_attention,
    prefill_attention,
    prefill_tile,
    write_kv,
)
from isthmus.kernels.plan import plan_decode, plan_prefill
from isthmus.kernels.reference import Scoring
from isthmus.memory import Group, LayerKV, kv_spec

LAYER = 3  # of a group whose other layer must stay untouched
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 2
    k_dim: int = 16
    v_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    pages: torch.dtype | None = None  # None: as dtype
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class World:
    """Some sequences, their rows in full, and pages for what a step may need of them."""

    shape: Shape
    device: str
    counts: np.ndarray  # new tokens of each sequence
    past: np.ndarray
    group: Group
    arena: Tensor
    table: np.ndarray  # [sequences, columns], 0 = no page: the null page, NaN like everything nobody owns
    query: Tensor  # [T, heads, k_dim]
    keys: list[Tensor]  # per sequence, all its rows, as pages hold them
    values: list[Tensor]

    @property
    def query_start(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.counts)))

    def part(self, name: str) -> Tensor:
        part = self.group.spec.part(f"{LAYER}.{name}")
        dtype = getattr(torch, part.dtype)
        stride = self.group.spec.page_bytes // dtype.itemsize
        pages = self.arena.numel() // self.group.spec.page_bytes
        _, heads, dim = part.shape
        size = (pages, part.shape[0], heads, dim)
        return self.arena.view(dtype).as_strided(size, (stride, heads * dim, dim, 1), part.offset // dtype.itemsize)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.part("k"), self.part("v")

    def own(self, rows: list[Tensor]) -> Tensor:
        """The step's own rows, flat, a view of something wider as after a merged projection."""
        flat = torch.cat([x[p:] for x, p in zip(rows, self.past.tolist(), strict=True)])
        wide = torch.full(
            (len(flat), flat.shape[1] + 1, flat.shape[2]), torch.nan, dtype=flat.dtype, device=self.device
        )
        wide[:, :-1] = flat
        return wide[:, :-1]

    @property
    def page_table(self) -> Tensor:
        """Wider than its rows are long, as the table of a larger batch."""
        wide = torch.zeros(len(self.table), self.table.shape[1] + 3, dtype=torch.int32, device=self.device)
        wide[:, : self.table.shape[1]] = torch.from_numpy(self.table)
        return wide[:, : self.table.shape[1]]

    @property
    def slots(self) -> Tensor:
        """Of the step's own tokens."""
        page_size, slots = self.shape.page_size, []
        for row, n, past in zip(self.table, self.counts.tolist(), self.past.tolist(), strict=True):
            position = np.arange(past, past + n)
            page = row[position // page_size].astype(np.int64)
            slots.append(np.where(page == 0, -1, page * page_size + position % page_size))
        return torch.from_numpy(np.concatenate(slots)).to(self.device)

    def write(self, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        write_kv(
            self.own(self.keys),
            self.own(self.values),
            *self.pages,
            self.slots,
            k_scale=k_scale,
            v_scale=v_scale,
            early=True,
        )

    def blank(self) -> Tensor:
        shape = (len(self.query), self.shape.heads, self.shape.v_dim)
        return torch.full(shape, 77, dtype=self.query.dtype, device=self.device)


def world(device: str, shape: Shape, counts: Sequence[int], past: Sequence[int]) -> World:
    """Random rows; cached tokens that can still be seen lie in pages in random order, everything else is NaN."""
    draw = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    pages_dtype = shape.pages or shape.dtype
    name = str(pages_dtype).removeprefix("torch.")
    layers = [LayerKV(0, 1, 4, 4, name), LayerKV(LAYER, shape.kv_heads, shape.k_dim, shape.v_dim, name)]
    spec = kv_spec(layers, shape.page_size)
    group = Group("g", spec, "append" if shape.window is None else "window", shape.window)
    lengths = [n + p for n, p in zip(counts, past, strict=True)]
    columns = max(-(-n // shape.page_size) for n in lengths)
    table = draw.permutation(np.arange(1, len(counts) * columns + 1)).reshape(len(counts), columns).astype(np.int32)
    for row, length, p in zip(table, lengths, past, strict=True):
        low = 0 if shape.window is None else max(0, p - shape.window + 1)
        row[: low // shape.page_size] = 0
        row[-(-length // shape.page_size) :] = 0
    arena = torch.full(((table.size + 1) * spec.page_bytes,), 0xFF, dtype=torch.uint8, device=device)

    def rows(length: int, heads: int, dim: int) -> Tensor:
        x = torch.randn(length, heads, dim, generator=generator)
        return x.to(pages_dtype).to(shape.dtype).to(device)

    keys = [rows(n, shape.kv_heads, shape.k_dim) for n in lengths]
    values = [rows(n, shape.kv_heads, shape.v_dim) for n in lengths]
    query = rows(sum(counts), shape.heads, shape.k_dim)
    at = World(shape, device, np.array(counts), np.array(past), group, arena, table, query, keys, values)
    for row, p, key, value in zip(table, past, keys, values, strict=True):
        low = 0 if shape.window is None else max(0, p - shape.window + 1)
        position = np.arange(low, p)
        page = torch.from_numpy(row[position // shape.page_size].astype(np.int64)).to(device)
        offset = torch.from_numpy(position % shape.page_size).to(device)
        for pages, x in zip(at.pages, (key, value), strict=True):
            words = pages.view(torch.uint8) if pages.itemsize == 1 else pages
            own = x[low:p].to(pages_dtype)
            words[page, offset] = own.view(torch.uint8) if pages.itemsize == 1 else own
    return at


def dense(at: World, how: Scoring, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
    """Softmax over whole rows in double precision."""
    out = []
    sinks = None if how.sinks is None else how.sinks.double()[:, None]
    for s, (count, past) in enumerate(zip(at.counts.tolist(), at.past.tolist(), strict=True)):
        key, value = (
            x[s].double().repeat_interleave(at.shape.group, 1) * scale
            for x, scale in ((at.keys, k_scale), (at.values, v_scale))
        )
        for i in range(count):
            p = past + i
            low = 0 if at.shape.window is None else max(0, p - at.shape.window + 1)
            query = at.query[at.query_start[s] + i].double()
            score = torch.einsum("hd,nhd->hn", query, key[low : p + 1]) * how.scaling
            if how.softcap is not None:
                score = how.softcap * torch.tanh(score / how.softcap)
            with_sink = score if sinks is None else torch.cat((score, sinks), 1)
            weight = torch.softmax(with_sink, 1)[:, : score.shape[1]]
            out.append(torch.einsum("hn,nhd->hd", weight, value[low : p + 1]))
    return torch.stack(out)


def scoring(at: World, *, softcap: float | None = None, sinks: bool = False) -> Scoring:
    heads = torch.linspace(-2, 3, at.shape.heads, device=at.device) if sinks else None
    return Scoring(at.shape.k_dim**-0.5, softcap, heads)


def plan(at: World, programs: int, padding: int = 0) -> DecodeItems:
    """Decodes of a step, `padding` lanes behind them and some items that are not live behind those."""
    which = np.flatnonzero(at.counts == 1)
    end = at.past[which] + 1
    first = np.zeros_like(end) if at.shape.window is None else np.maximum(end - at.shape.window, 0)
    tokens = np.concatenate((at.query_start[which], np.arange(len(at.query) - padding, len(at.query))))
    sequences = np.concatenate((which, np.zeros(padding, np.int64)))
    first, end = (np.concatenate((x, np.full(padding, 7))) for x in (first, end))
    work = plan_decode(tokens, sequences, first, end, programs=programs)
    dead = np.full((5, 8), 1 << 20, np.int32)
    items, bounds = (torch.from_numpy(x).to(at.device) for x in (np.concatenate((work.items, dead)), work.bounds))
    return DecodeItems(items, bounds)


def decode(
    at: World,
    how: Scoring,
    programs: int = 3,
    padding: int = 0,
    items: DecodeItems | None = None,
    config: DecodeConfig | None = None,
    workspace: Workspace | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    out, items = at.blank(), items or plan(at, programs, padding)
    workspace = workspace or Workspace.of(len(items.items), at.shape.heads, at.shape.v_dim, at.device)
    decode_attention(
        at.query,
        out,
        *at.pages,
        at.page_table,
        items,
        workspace,
        how,
        k_scale=scales[0],
        v_scale=scales[1],
        config=config,
        early=True,
    )
    assert not workspace.counters.any(), "a counter was left for the next launch"
    return out


def tiles_of(at: World, config: PrefillConfig | None = None, *, programs: int = 1, width: int = 0) -> PrefillTiles:
    """Tiles of a step's chunks, cut as programs have work, or in parts of `width` keys."""
    shape = at.shape
    which = np.flatnonzero(at.counts > 1)
    block = prefill_tile(shape.group, shape.k_dim, shape.v_dim, shape.dtype.itemsize)
    if config is not None:
        block = max(1, config.block_m // shape.group)
    bounds = np.stack((at.query_start[:-1], at.query_start[1:]))[:, which]
    work = plan_prefill(bounds, at.past[which], which, block, shape.window, programs=programs)
    if width:
        work = cut_all(work.tiles, width, block, shape.window)
    return PrefillTiles(torch.from_numpy(work.tiles).to(at.device), block, work.slots, shape.window)


def poisoned(at: World, tiles: PrefillTiles, config: PrefillConfig | None = None) -> Workspace:
    """Room for the parts of a launch, full of NaN."""
    rows = 2 * tiles.slots * at.shape.heads * max(tiles.block, 0 if config is None else config.block_m, 128)
    workspace = Workspace.holding([(rows, at.shape.v_dim)], at.device)
    workspace.rows.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    return workspace


def prefill(
    at: World,
    how: Scoring,
    config: PrefillConfig | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    tiles: PrefillTiles | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    out, tiles = at.blank(), tiles or tiles_of(at, config)
    prefill_attention(
        at.query,
        out,
        at.own(at.keys),
        at.own(at.values),
        *at.pages,
        at.page_table,
        tiles,
        workspace or poisoned(at, tiles, config),
        how,
        k_scale=scales[0],
        v_scale=scales[1],
        config=config,
    )
    return out


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


SHAPES = [
    Shape(1, 4, 64, 64, 16),
    Shape(2, 3, 80, 80, 4),
    Shape(1, 1, 96, 96, 1),
    Shape(1, 5, 192, 128, 32),
    Shape(4, 2, 32, 16, 128, torch.bfloat16),
    Shape(1, 4, 256, 256, 64, torch.bfloat16),
    Shape(1, 2, 512, 512, 16, torch.bfloat16),
    Shape(2, 8, 128, 128, 16, torch.float16),
    Shape(1, 20, 64, 64, 64, torch.bfloat16),
]


def name_of(shape: Shape) -> str:
    return f"{shape.kv_heads}x{shape.group} heads {shape.k_dim}-{shape.v_dim}, pages of {shape.page_size} {shape.dtype}"


def cut(at: World, config: PrefillConfig | None = None, width: int = 64) -> PrefillTiles:
    """Every tile in parts of as few keys as there can be."""
    tiles = tiles_of(at, config, width=width)
    assert tiles.slots > 0, "nothing is cut"
    return tiles


FP8 = Shape(2, 2, 32, 64, 16, torch.bfloat16, torch.float8_e4m3fn)
