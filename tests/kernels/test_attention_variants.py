"""Latent rows, relative scores and chunked windows on a device, against the CPU's operators, in an arena of NaN.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.tile_parts import cut_all
from torch import Tensor

from isthmus.engine.device_plan import DevicePlan, Grain, Tables
from isthmus.engine.step import BlockWrites, Step
from isthmus.kernels.attention import DecodeItems, PrefillTiles, Workspace, decode_config, head_tiles, prefill_tile
from isthmus.kernels.reference import LayerCache, PartView, Scoring, Scratch, attend, group_batch
from isthmus.memory import Delta, Group, LayerKV, kv_spec
from isthmus.model.device_attention import DeviceBatch, GroupStep, LayerPages

LAYER = 3
PAST = (0, 37, 130, 5, 12)
COUNTS = (19, 1, 23, 1, 1)
"""Of sequences in the step: chunks and decodes mixed, some with nothing before them."""


@dataclass(frozen=True)
class Case:
    """One layer: `rank` values at the start of its keys, or `v_dim` of their own."""

    kv_heads: int = 1
    group: int = 3
    k_dim: int = 24
    v_dim: int = 16
    rank: int | None = None
    window: int | None = None
    chunked: bool = False
    distances: int | None = None
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    pages: str = "float32"
    last: float = 1.0  # what the last number of queries is multiplied by, and scores divided by

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


CASES = {
    "latent": Case(group=5, k_dim=31, v_dim=20, rank=20, page_size=16),
    "latent, bf16": Case(group=4, k_dim=40, v_dim=32, rank=32, dtype=torch.bfloat16, pages="bfloat16"),
    "latent, fp8": Case(group=4, k_dim=40, v_dim=32, rank=32, dtype=torch.bfloat16, pages="float8_e4m3fn"),
    "latent, fp8, queries with a large end": Case(
        group=4, k_dim=40, v_dim=32, rank=32, dtype=torch.bfloat16, pages="float8_e4m3fn", last=2.0**18
    ),
    "latent, heads in tiles": Case(
        group=34, k_dim=260, v_dim=257, rank=257, dtype=torch.bfloat16, pages="bfloat16", page_size=16
    ),
    "relative, window": Case(kv_heads=2, window=16, distances=24),
    "relative, short": Case(distances=3, page_size=1),
    "chunked": Case(kv_heads=2, window=12, chunked=True),
    "chunked, latent": Case(rank=16, window=7, chunked=True),
}


@pytest.mark.parametrize("width", [0, 64], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", CASES)
def test_a_mixed_step_equals_the_reference(device: str, name: str, width: int) -> None:
    """Also with tiles in parts of `width` keys, of which windows and chunks see some, or none."""
    case = CASES[name]
    cpu, theirs = _world(case)
    arena = torch.full_like(cpu.arena, 0xFF)
    owned = torch.from_numpy(cpu.table[cpu.table > 0].astype(np.int64))
    pages = cpu.arena.view(-1, cpu.group.spec.page_bytes)
    arena.view(-1, cpu.group.spec.page_bytes)[owned] = pages[owned]
    ours = arena.to(device)
    found = _on_device(case, cpu, ours, width)
    wanted = theirs()
    tolerance = 2e-5 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.cpu().view(pages.shape)[owned], pages[owned]), "rows lie elsewhere, or were written twice"


@dataclass(frozen=True)
class _World:
    group: Group
    arena: Tensor  # as the CPU has it
    table: np.ndarray
    query: Tensor
    key: Tensor
    value: Tensor
    how: Scoring

    @property
    def start(self) -> np.ndarray:
        return np.cumsum([0, *COUNTS])


def _world(case: Case) -> tuple[_World, Callable[[], Tensor]]:
    """A step of which the past was written by the CPU's operators; and what they make of the rest."""
    draw = torch.Generator().manual_seed(0)
    layers = [LayerKV(0, 1, 4, 4, case.pages), LayerKV(LAYER, case.kv_heads, case.k_dim, case.v_dim, case.pages)]
    if case.rank is not None:
        layers[1] = replace(layers[1], v_dim=0)
    group = Group("g", kv_spec(layers, case.page_size), "append" if case.window is None else "window", case.window)
    total = [n + p for n, p in zip(COUNTS, PAST, strict=True)]
    columns = -(-max(total) // case.page_size)
    table = np.random.default_rng(0).permutation(np.arange(1, len(total) * columns + 1)).reshape(-1, columns)
    for row, length in zip(table, total, strict=True):
        row[-(-length // case.page_size) :] = 0
    arena = torch.full(((table.max() + 1) * group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
    cache = LayerCache(
        PartView.of(arena, group, f"{LAYER}.k"),
        None if case.rank is not None else PartView.of(arena, group, f"{LAYER}.v"),
    )

    def rows(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        key = torch.randn(tokens, case.kv_heads, case.k_dim, generator=draw).to(case.dtype)
        value = torch.randn(tokens, case.kv_heads, case.v_dim, generator=draw).to(case.dtype)
        query = torch.randn(tokens, case.heads, case.k_dim, generator=draw).to(case.dtype)
        query[..., -1] *= case.last
        return query, key, value if case.rank is None else key[..., : case.rank]

    def bias(tokens: int) -> Tensor | None:
        if case.distances is None:
            return None
        wide = torch.randn(tokens, case.heads, case.distances + 5, generator=draw).to(case.dtype)
        return wide[..., : case.distances]

    def run(counts: np.ndarray, past: np.ndarray, given: tuple[Tensor, Tensor, Tensor], how: Scoring) -> Tensor:
        which = np.flatnonzero(counts)
        start = np.cumsum([0, *counts[which]])
        at = group_batch(
            group, start, past[which], lambda s, c: table[which[s], c].astype(np.int64), chunked=case.chunked
        )
        return attend(*given, cache, at, how, Scratch(), write=True)

    before = np.array(PAST)
    run(before, np.zeros_like(before), rows(sum(PAST)), Scoring(1.0, None, None, bias(sum(PAST))))
    own = rows(sum(COUNTS))
    how = Scoring(case.k_dim**-0.5 / case.last, None, None, bias(sum(COUNTS)))
    return _World(group, arena, table, *own, how), lambda: run(np.array(COUNTS), before, own, how)


def _on_device(case: Case, at: _World, arena: Tensor, width: int) -> Tensor:
    """The step through the kernels, as a layer of a model runs it; tiles in parts of so many keys, 0: whole."""
    device, name = arena.device, at.group.name
    none = np.zeros(0, np.int32)
    start, past = at.start.astype(np.int32), np.array(PAST, np.int32)
    step = Step(Delta(), BlockWrites(none, none, none), np.zeros(start[-1], np.int32), start, past, none, ())
    tables = Tables.of([at.group], {"tokens": 1}, 1, 1)
    tile = prefill_tile(case.group, case.k_dim, case.v_dim, case.dtype.itemsize)
    plan = DevicePlan.of(step, [at.group], tables, {name: Grain(tile, 4, 4)}, [name] if case.chunked else [])
    work = plan.groups[name]
    assert work.tiles is not None
    tiles = work.tiles
    assert tiles.slots == 0
    if width:
        tiles = cut_all(tiles.tiles, width, tile, case.window, chunked=case.chunked)
        assert tiles.slots > 0
    counts = np.array(COUNTS)
    position = plan.positions
    page = at.table[np.repeat(np.arange(len(counts)), counts), position // case.page_size].astype(np.int64)
    table = at.table.copy()
    for row, first in zip(table, work.first, strict=True):
        row[:first] = 0  # the null page, NaN: nobody may look
    to: dict[str, Any] = {"device": device}
    group = GroupStep(
        torch.from_numpy(page * case.page_size + position % case.page_size).to(**to),
        torch.from_numpy(table.astype(np.int32)).to(**to),
        DecodeItems(*(torch.from_numpy(x).to(**to) for x in work.decodes[:2])),
        PrefillTiles(torch.from_numpy(tiles.tiles).to(**to), tile, tiles.slots, case.window, case.chunked),
    )
    pages = LayerPages.of(arena, at.group, LAYER, case.rank)
    rows = max(len(work.decodes.items) * case.heads, tiles.slots * case.heads * 128)
    workspace = Workspace.holding([(rows, case.v_dim)], device)
    batch = DeviceBatch({LAYER: name}, {LAYER: LAYER}, {LAYER: pages}, workspace, early=True)
    batch.step = {name: group}
    how = at.how if at.how.relative is None else replace(at.how, relative=at.how.relative.to(**to))
    query, key, value = (x.to(**to) for x in (at.query, at.key, at.value))
    if case.rank is not None:
        value = key[..., : case.rank]
    return batch.run(query, key, value, LAYER, how)


def test_heads_are_cut_alike_and_blocks_of_latent_rows_fit() -> None:
    assert [head_tiles(group, 512) for group in (8, 32, 48, 64, 128)] == [1, 1, 2, 2, 4]
    assert head_tiles(71, 64) == 1
    config = decode_config(576, 512, 2, shared=True)
    row_bytes = (512 + 64) * 2
    assert config.block_n * row_bytes * (config.num_stages - 1) <= 160 << 10, "of the 227 KiB a program can have"
