"""The GPU kernels against dense attention in double precision and against the CPU reference, in an arena of NaN.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
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
from isthmus.kernels.reference import LayerCache, PartView, Scoring, Scratch, attend, group_batch
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
        write_kv(self.own(self.keys), self.own(self.values), *self.pages, self.slots, k_scale=k_scale, v_scale=v_scale)

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


def _name(shape: Shape) -> str:
    return f"{shape.kv_heads}x{shape.group} heads {shape.k_dim}-{shape.v_dim}, pages of {shape.page_size} {shape.dtype}"


@pytest.mark.parametrize("shape", SHAPES, ids=_name)
def test_a_decode_sees_its_whole_context(device: str, shape: Shape) -> None:
    at = world(device, shape, [1, 1, 1], [0, 37, 150])
    at.write()
    close(decode(at, scoring(at)), dense(at, scoring(at)), shape.dtype)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_decode_sees_its_window_only(device: str, page_size: int) -> None:
    at = world(device, Shape(2, 2, 32, 32, page_size, window=50), [1, 1, 1, 1], [3, 49, 50, 260])
    at.write()
    close(decode(at, scoring(at)), dense(at, scoring(at)), torch.float32)


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True), (0.5, True)])
@pytest.mark.parametrize("target", [1, 64], ids=["whole", "in parts"])
def test_soft_cap_and_sinks(device: str, softcap: float | None, sinks: bool, target: int) -> None:
    at = world(device, Shape(), [1, 1], [20, 200])
    at.write()
    how = scoring(at, softcap=softcap, sinks=sinks)
    close(decode(at, how, target), dense(at, how), torch.float32)


@pytest.mark.parametrize("length", [130, 64 * 16, 64 * 16 + 1, 64 * 35])
def test_parts_of_a_sequence_are_merged(device: str, length: int) -> None:
    """One level of merging up to 16 parts, two beyond."""
    at = world(device, Shape(2, 2, 16, 16, 64), [1, 1], [length - 1, 70])
    at.write()
    slots = len(plan(at, 64).items) - 5
    assert slots >= length // 64
    close(decode(at, scoring(at), 64, config=DecodeConfig(64, 4, 2)), dense(at, scoring(at)), torch.float32)


def test_a_workspace_serves_launch_after_launch(device: str) -> None:
    """Layers of different shapes share one; what a launch leaves in it must not matter to the next."""
    wide = world(device, Shape(2, 2, 16, 32, 16), [1, 1], [400, 150])
    narrow = world(device, Shape(1, 4, 16, 16, 16), [1], [500])
    workspace = Workspace.of(64, 4, 32, device)
    workspace.rows.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    for at in (wide, narrow, wide):
        at.write()
        close(decode(at, scoring(at), 16, workspace=workspace), dense(at, scoring(at)), torch.float32)


@pytest.mark.parametrize("programs", [1, 7, 200])
def test_the_answer_does_not_depend_on_who_computes_it(device: str, programs: int) -> None:
    """Parts are merged in the order of their slots, bit for bit, however many programs have them."""
    at = world(device, Shape(), [1, 1, 1], [300, 1100, 64])
    at.write()
    config = DecodeConfig(64, 4, 2)
    items = plan(at, 20)
    wanted = decode(at, scoring(at), config=config, items=items)
    bounds = np.linspace(0, int(items.bounds[-1]), programs + 1).round().astype(np.int32)
    others = DecodeItems(items.items, torch.from_numpy(bounds).to(device))
    assert torch.equal(decode(at, scoring(at), config=config, items=others), wanted)


def test_padding_lanes_become_zero_and_others_stay(device: str) -> None:
    at = world(device, Shape(), [1, 5, 1, 2], [40, 0, 90, 0])
    at.write()
    out = decode(at, scoring(at), padding=2)
    wanted = dense(at, scoring(at))
    for token in (0, 6):
        close(out[token], wanted[token], torch.float32)
    assert (out[1:6] == 77).all(), "a decode launch wrote tokens that are not its own"
    assert not out[7:].any(), "padding lanes must hold numbers: later layers compute with them"


def test_no_items_is_no_work(device: str) -> None:
    at = world(device, Shape(), [2], [40])
    assert (decode(at, scoring(at)) == 77).all()


@pytest.mark.parametrize("shape", SHAPES, ids=_name)
def test_a_chunk_sees_cached_rows_then_its_own(device: str, shape: Shape) -> None:
    at = world(device, shape, [19, 40], [45, 0])
    close(prefill(at, scoring(at)), dense(at, scoring(at)), shape.dtype)


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_chunk_sees_its_window_only(device: str, window: int, page_size: int) -> None:
    at = world(device, Shape(2, 3, 16, 32, page_size, window=window), [50, 2, 33], [70, 150, 0])
    how = scoring(at, softcap=2.0, sinks=True)
    close(prefill(at, how, PrefillConfig(32, 16, 4, 2)), dense(at, how), torch.float32)


def cut(at: World, config: PrefillConfig | None = None, width: int = 64) -> PrefillTiles:
    """Every tile in parts of as few keys as there can be."""
    tiles = tiles_of(at, config, width=width)
    assert tiles.slots > 0, "nothing is cut"
    return tiles


@pytest.mark.parametrize("shape", SHAPES, ids=_name)
def test_a_chunk_in_parts_sees_cached_rows_then_its_own(device: str, shape: Shape) -> None:
    """Several parts of cached rows; a part that begins among them and ends among the chunk's own."""
    at = world(device, shape, [19, 3, 42], [150, 64, 40])
    close(prefill(at, scoring(at), tiles=cut(at)), dense(at, scoring(at)), shape.dtype)


@pytest.mark.parametrize("window", [10, 20, 100, 300])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_chunk_in_parts_sees_its_window_only(device: str, window: int, page_size: int) -> None:
    """Of a part that ends where a query's window begins it sees nothing."""
    at = world(device, Shape(2, 3, 16, 32, page_size, window=window), [50, 2, 90], [130, 191, 30])
    how, config = scoring(at, softcap=2.0, sinks=True), PrefillConfig(128, 32, 4, 2)
    close(prefill(at, how, config, tiles=cut(at, config)), dense(at, how), torch.float32)


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True), (0.5, True)])
def test_a_chunk_in_parts_has_soft_cap_and_sinks(device: str, softcap: float | None, sinks: bool) -> None:
    """A sink counts once, however many parts there are."""
    at = world(device, Shape(), [9, 12], [260, 70])
    how = scoring(at, softcap=softcap, sinks=sinks)
    close(prefill(at, how, tiles=cut(at)), dense(at, how), torch.float32)


def test_a_step_is_cut_where_programs_have_no_work(device: str) -> None:
    """As a step is planned: a short chunk behind many tokens, a middling one, a whole prompt, and decodes beside."""
    at = world(device, Shape(1, 4), [10, 1, 20, 30, 1], [700, 40, 150, 0, 3])
    tiles = tiles_of(at, programs=8)
    assert 0 < tiles.slots < len(tiles.tiles)
    out, wanted = prefill(at, scoring(at), tiles=tiles), dense(at, scoring(at))
    chunks = torch.from_numpy(np.repeat(at.counts > 1, at.counts)).to(device)
    close(out[chunks], wanted[chunks], torch.float32)
    assert (out[~chunks] == 77).all()
    assert torch.equal(prefill(at, scoring(at), tiles=tiles), out), "not the same bits again"
    whole = torch.from_numpy(np.repeat(at.counts == 30, at.counts)).to(device)
    assert torch.equal(prefill(at, scoring(at))[whole], out[whole]), "what is not cut must be as it was"


def test_rows_of_a_plan_that_nobody_has_are_no_work(device: str) -> None:
    """A graph has room for more tiles, and merges as many slots as there can ever be."""
    at = world(device, Shape(), [5, 20], [200, 10])
    tiles = cut(at)
    rows = torch.zeros(40, 8, dtype=torch.int32, device=device)
    rows[: len(tiles.tiles)] = tiles.tiles
    roomy = replace(tiles, tiles=rows, slots=30)
    close(prefill(at, scoring(at), tiles=roomy), dense(at, scoring(at)), torch.float32)
    roomy.tiles.zero_()
    assert (prefill(at, scoring(at), tiles=roomy) == 77).all()


def test_decodes_and_chunks_share_a_workspace(device: str) -> None:
    """Layer after layer, decodes first; neither is disturbed by what the others left."""
    at = world(device, Shape(2, 2, 16, 16, 16), [1, 9], [500, 150])
    at.write()
    tiles, wanted = cut(at), dense(at, scoring(at))
    workspace = poisoned(at, tiles)
    for _ in range(2):
        close(decode(at, scoring(at), 16, workspace=workspace)[:1], wanted[:1], torch.float32)
        close(prefill(at, scoring(at), tiles=tiles, workspace=workspace)[1:], wanted[1:], torch.float32)


def test_only_chunks_are_written(device: str) -> None:
    at = world(device, Shape(), [1, 9, 1], [30, 8, 0])
    out = prefill(at, scoring(at))
    close(out[1:10], dense(at, scoring(at))[1:10], torch.float32)
    assert (out[[0, 10]] == 77).all()


@pytest.mark.parametrize("window", [None, 40])
def test_a_mixed_step_equals_the_reference(device: str, window: int | None) -> None:
    at = world(device, Shape(2, 2, 32, 16, 16, window=window), [1, 30, 1, 7], [100, 25, 3, 64])
    how = scoring(at, softcap=3.0, sinks=True)
    arena = at.arena.cpu().clone()
    cache = LayerCache(*(PartView.of(arena, at.group, f"{LAYER}.{x}") for x in "kv"))
    batch = group_batch(at.group, at.query_start, at.past, lambda s, c: at.table[s, c].astype(np.int64))
    own = at.own(at.keys).cpu(), at.own(at.values).cpu()
    on_cpu = replace(how, sinks=how.sinks.cpu() if how.sinks is not None else None)
    wanted = attend(at.query.cpu(), *own, cache, batch, on_cpu, Scratch(), write=True)
    at.write()
    decoded, chunks = decode(at, how, 8).cpu(), prefill(at, how).cpu()
    single = torch.from_numpy(np.repeat(at.counts == 1, at.counts))
    torch.testing.assert_close(torch.where(single[:, None, None], decoded, chunks), wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(at.arena.cpu(), arena), "the step's rows lie elsewhere than the reference puts them"


FP8 = Shape(2, 2, 32, 64, 16, torch.bfloat16, torch.float8_e4m3fn)


def test_fp8_pages_are_read_with_their_scales(device: str) -> None:
    at = world(device, FP8, [1, 1], [60, 200])
    how, scales = scoring(at), (0.5, 3.0)
    wanted = dense(at, how, *scales)
    at.keys = [x * 0.5 for x in at.keys]  # the write divides by the scale: pages hold what `dense` was given
    at.values = [x * 3.0 for x in at.values]
    at.write(*scales)
    close(decode(at, how, 8, scales=scales), wanted, torch.bfloat16)


def test_parts_of_fp8_pages_have_their_scales(device: str) -> None:
    at = world(device, FP8, [9, 20], [150, 64])
    how, scales = scoring(at), (0.5, 3.0)
    wanted = dense(at, how, *scales)
    at.keys = [x * 0.5 for x in at.keys]
    at.values = [x * 3.0 for x in at.values]
    close(prefill(at, how, scales=scales, tiles=cut(at)), wanted, torch.bfloat16)


def test_how_a_prompt_is_cut_does_not_change_fp8_rows(device: str) -> None:
    """A chunk's own rows count as their pages will hold them, so it must not matter which rows are its own."""
    whole = world(device, FP8, [48], [0])
    generator = torch.Generator().manual_seed(1)
    whole.keys = [x + torch.randn(x.shape, generator=generator).to(x) / 9 for x in whole.keys]  # between fp8 numbers
    whole.values = [x + torch.randn(x.shape, generator=generator).to(x) / 9 for x in whole.values]
    scales = (0.5, 3.0)
    config = PrefillConfig(32, 16, 4, 2)  # keys 16 at a time both ways, so sums are alike
    wanted = prefill(whole, scoring(whole), config, scales)
    assert wanted.isfinite().all()
    whole.write(*scales)
    late = replace(whole, counts=np.array([16]), past=np.array([32]), query=whole.query[32:])
    torch.testing.assert_close(prefill(late, scoring(late), config, scales), wanted[32:], atol=1e-5, rtol=1e-5)


def test_rows_are_written_to_their_slots_only(device: str) -> None:
    at = world(device, Shape(3, 1, 16, 8, 4), [6, 1], [3, 10])
    slots = at.slots
    slots[2] = -1
    key, value = at.own(at.keys), at.own(at.values)
    before = [pages.clone() for pages in at.pages]
    other = at.arena.clone()
    write_kv(key, value, *at.pages, slots)
    for pages, old, own in zip(at.pages, before, (key, value), strict=True):
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                old[slot // 4, slot % 4] = own[i]
        torch.testing.assert_close(pages, old, atol=0, rtol=0, equal_nan=True)
    for pages, old in zip(at.pages, before, strict=True):
        pages.copy_(old)
    written = (at.arena != other).nonzero()
    part = at.group.spec.part(f"{LAYER}.k")
    assert (written % at.group.spec.page_bytes >= part.offset).all(), "another layer's rows were touched"


def test_fp8_rows_saturate(device: str) -> None:
    """A row beyond the largest fp8 number becomes that number, never NaN: one NaN would spoil every later token."""
    at = world(device, replace(FP8, kv_heads=1, v_dim=32), [3], [0])
    at.keys[0][:] = torch.tensor([1e4, -1e4, 1.03], device=device).to(torch.bfloat16)[:, None, None]
    at.write()
    key = at.part("k").view(torch.uint8).flatten(0, 1)[at.slots, 0].view(torch.float8_e4m3fn).float()
    assert key.amax(1).tolist() == key.amin(1).tolist() == [448.0, -448.0, 1.0]


def test_an_arena_of_more_elements_than_an_int32_counts(device: str) -> None:
    """Pages far behind the first: offsets that wrap would read and write elsewhere (or crash)."""
    at = world(device, Shape(1, 2, 16, 16, 16, torch.bfloat16), [1, 18], [40, 30])
    page_bytes = at.group.spec.page_bytes
    far = (1 << 32) // page_bytes + 5  # byte 2^32 is element 2^31
    arena = torch.empty((far + len(at.arena) // page_bytes + 1) * page_bytes, dtype=torch.uint8, device=device)
    arena[far * page_bytes :][: len(at.arena)] = at.arena
    at.arena, at.table = arena, np.where(at.table == 0, 0, at.table + far).astype(np.int32)
    at.write()
    wanted = dense(at, scoring(at))
    close(decode(at, scoring(at))[:1], wanted[:1], torch.bfloat16)
    close(prefill(at, scoring(at))[1:], wanted[1:], torch.bfloat16)


@pytest.mark.gpu
def test_one_captured_graph_serves_any_lengths() -> None:
    long = world("cuda", Shape(2, 2, 64, 64, 16, torch.bfloat16), [1] * 4, [700, 30, 1500, 64])
    long.write()
    short = replace(long, past=np.array([5, 30, 0, 1]))
    how, table, out = scoring(long), long.page_table, long.blank()
    workspace = Workspace.of(256, 4, 64, "cuda")
    live = DecodeItems(torch.zeros(256, 8, dtype=torch.int32).cuda(), torch.zeros(65, dtype=torch.int32).cuda())

    def launch() -> None:
        decode_attention(long.query, out, *long.pages, table, live, workspace, how)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for at in (long, short, long):
        planned = plan(at, 64)
        live.items[: len(planned.items)] = planned.items
        live.bounds.copy_(planned.bounds)
        out.fill_(77)
        graph.replay()
        close(out, dense(at, how), torch.bfloat16)


@pytest.mark.gpu
def test_one_captured_graph_serves_chunks_of_any_lengths() -> None:
    """In parts and whole, in the same places."""
    long = world("cuda", Shape(2, 2, 64, 64, 16, torch.bfloat16), [60, 4], [3000, 1500])
    short = replace(long, past=np.array([20, 70]))
    short = replace(short, keys=[x[:80] for x in long.keys], values=[x[:80] for x in long.values])
    short.keys[1], short.values[1] = (x[1][:74] for x in (long.keys, long.values))
    how, table, out = scoring(long), long.page_table, long.blank()
    first = tiles_of(long, programs=66)
    live = replace(first, tiles=torch.zeros(200, 8, dtype=torch.int32).cuda(), slots=132)
    workspace = poisoned(long, live)
    key, value = (torch.empty_like(long.own(x)) for x in (long.keys, long.values))

    def launch() -> None:
        prefill_attention(long.query, out, key, value, *long.pages, table, live, workspace, how)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    slots = []
    for at in (long, short, long):
        planned = tiles_of(at, programs=66)
        slots.append(planned.slots)
        live.tiles.zero_()
        live.tiles[: len(planned.tiles)] = planned.tiles
        key.copy_(at.own(at.keys))
        value.copy_(at.own(at.values))
        out.fill_(77)
        graph.replay()
        close(out, dense(at, how), torch.bfloat16)
    assert slots[0] > 0
    assert slots[1] == 0
