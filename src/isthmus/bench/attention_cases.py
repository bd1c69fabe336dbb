"""Attention launches that stand for what models ask for: sequences of a length, pages at random places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from isthmus.bench.layouts import DTYPE, ITEMSIZE, Heads, Layout, Placed, place
from isthmus.kernels.attention import (
    DecodeConfig,
    DecodeItems,
    PrefillConfig,
    PrefillTiles,
    Workspace,
    decode_attention,
    prefill_attention,
    prefill_config,
    prefill_programs,
    prefill_rows,
)
from isthmus.kernels.plan import plan_decode, plan_prefill
from isthmus.kernels.reference import Scoring

PROGRAMS = 2
"""Per multiprocessor, unless a case says otherwise."""

_SETS = 3  # of activations, in turn


@dataclass(frozen=True)
class Decode:
    """One token each for some sequences."""

    heads: Heads
    sequences: int
    cached: int  # tokens of each, its own among them
    window: int | None = None
    page_size: int = 16
    layout: Layout = "page-major"
    programs: int = PROGRAMS  # per multiprocessor
    config: DecodeConfig | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that are read."""
        return self.sequences * min(self.cached, self.window or self.cached) * self.heads.row_bytes


@dataclass(frozen=True)
class Prefill:
    """A chunk each for some sequences."""

    heads: Heads
    sequences: int
    chunk: int
    past: int = 0  # cached tokens of each
    window: int | None = None
    page_size: int = 16
    layout: Layout = "page-major"
    config: PrefillConfig | None = None
    split: bool = True  # tiles are cut where programs have no work

    @property
    def kv_bytes(self) -> int:
        """Bytes of cached K and V that somebody sees."""
        return self.sequences * min(self.past, (self.window or self.past + 1) - 1) * self.heads.row_bytes

    @property
    def operations(self) -> int:
        """Multiplications and additions of the two products, over the pairs that are not masked."""
        seen = np.arange(self.past + 1, self.past + self.chunk + 1, dtype=np.int64)
        pairs = int(np.minimum(seen, self.window or seen[-1]).sum())
        return 4 * self.sequences * pairs * self.heads.heads * self.heads.dim


Case = Decode | Prefill
Launches = Sequence[Callable[[], None]]


def launches(case: Case, arena: Tensor, programs_of: int) -> Launches:
    """One launch for each layer that fits the arena (uint8, on the device), ready to go.

    `programs_of` is the number of multiprocessors. The arena's bytes are the cached rows, whatever they are.
    """
    return _decode(case, arena, programs_of) if isinstance(case, Decode) else _prefill(case, arena, programs_of)


def _decode(case: Decode, arena: Tensor, cores: int) -> Launches:
    heads, n, device = case.heads, case.sequences, arena.device
    end = np.full(n, case.cached, np.int64)
    first = np.maximum(end - (case.window or case.cached), 0)
    placed = place(arena, heads, case.layout, case.page_size, first, end)
    programs = max(1, case.programs * cores // heads.kv_heads)  # of each KV head
    which = np.arange(n, dtype=np.int32)
    work = plan_decode(which, which, first, end, programs=programs)
    plan = DecodeItems(_on(work.items, device), _on(work.bounds, device))
    query, out = (_random(n, heads.heads, heads.dim, device) for _ in range(2))
    how, table = Scoring(heads.dim**-0.5), _on(placed.page_table, device)
    workspace = Workspace.of(len(work.items), heads.heads, heads.dim, device)
    return [
        partial(decode_attention, query, out, key, value, table, plan, workspace, how, config=case.config, early=True)
        for key, value in placed.layers
    ]


def _prefill(case: Prefill, arena: Tensor, cores: int) -> Launches:
    heads, n, device = case.heads, case.sequences, arena.device
    placed, table = _cached(case, arena)
    shape = (heads.kv_heads, heads.group, heads.dim, heads.dim, ITEMSIZE)
    block_m = (case.config or prefill_config(heads.dim, heads.dim, ITEMSIZE)).block_m
    block = max(1, block_m // heads.group)
    programs = prefill_programs(cores, *shape) if case.split else 1
    start = np.arange(n + 1, dtype=np.int32) * case.chunk
    past, which = np.full(n, case.past, np.int32), np.arange(n, dtype=np.int32)
    work = plan_prefill(np.stack((start[:-1], start[1:])), past, which, block, case.window, programs=programs)
    plan = PrefillTiles(_on(work.tiles, device), block, work.slots, case.window)
    rows = prefill_rows(work.slots, block, *shape, case.config)
    workspace = Workspace.holding([(rows, heads.dim)], device)
    tokens, how = n * case.chunk, Scoring(heads.dim**-0.5)
    found = []
    sets = [
        (
            *(_random(tokens, heads.heads, heads.dim, device) for _ in range(2)),
            *(_random(tokens, heads.kv_heads, heads.dim, device) for _ in range(2)),
        )
        for _ in range(_SETS)
    ]
    for i in range(max(len(placed.layers), _SETS)):
        key_pages, value_pages = placed.layers[i % len(placed.layers)]
        query, out, key, value = sets[i % _SETS]
        given = query, out, key, value, key_pages, value_pages, table, plan, workspace, how
        found.append(partial(prefill_attention, *given, config=case.config))
    return found


def _cached(case: Prefill, arena: Tensor) -> tuple[Placed, Tensor]:
    end = np.full(case.sequences, max(1, case.past), np.int64)  # a view needs a page, read or not
    first = np.maximum(case.past - (case.window or case.past + 1) + 1, 0) * np.ones_like(end)
    placed = place(arena, case.heads, case.layout, case.page_size, np.minimum(first, end - 1), end)
    return placed, _on(placed.page_table, arena.device)


def _random(tokens: int, heads: int, dim: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, heads, dim, dtype=DTYPE, device=device)


def _on(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
