"""What the kernels between two forwards take: rows into pages, page moves, table writes, translation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.bench.clock import gpu_time
from isthmus.bench.kernel_cases import GEMMA_1B, WINDOWS_4B
from isthmus.bench.layouts import DTYPE, place
from isthmus.kernels.pages import copy_pages, scatter, translate
from isthmus.kernels.write_kv import write_kv

_PAGE = 16  # tokens
_ROWS, _COLUMNS = 256, 2048  # of the block table
_IDS = 1 << 20
_MOVED_BYTES = 1 << 30  # in the largest copy

Row = dict[str, Any]


def measure(arena: Tensor, copy: float) -> list[Row]:
    """A row for each kernel and size; `copy` is the bytes a second of a copy, `arena` uint8 on the device."""
    return [*_writes(arena, copy), *_copies(arena, copy), *_scatters(arena.device), *_translations(arena.device)]


def _writes(arena: Tensor, copy: float) -> Iterator[Row]:
    """Decodes put a row into a page each; chunks fill pages."""
    rng, device = np.random.default_rng(0), arena.device
    for heads in (GEMMA_1B, WINDOWS_4B):
        placed = place(arena, heads, "page-major", _PAGE, np.zeros(64, np.int64), np.full(64, 1024))
        pages = 1 + rng.permutation(len(placed.layers[0][0]) - 1)
        for tokens, slots in (
            (256, pages[:256] * _PAGE + rng.integers(0, _PAGE, 256)),
            (8192, (pages[: 8192 // _PAGE, None] * _PAGE + np.arange(_PAGE)).ravel()),
        ):
            key, value = (torch.randn(tokens, heads.kv_heads, heads.dim, dtype=DTYPE, device=device) for _ in range(2))
            where = torch.from_numpy(slots).to(device)
            work = [partial(write_kv, key, value, *layer, where, early=True) for layer in placed.layers]
            yield _row("write_kv", heads.name, tokens, work, 2 * tokens * heads.row_bytes, copy)


def _copies(arena: Tensor, copy: float) -> Iterator[Row]:
    for heads in (GEMMA_1B, WINDOWS_4B):
        page_bytes = heads.layers * heads.row_bytes * _PAGE
        for count in (1, 16, 256, _MOVED_BYTES // page_bytes):
            work = [
                partial(copy_pages, arena, page_bytes, source, destination)
                for source, destination in _moves(arena, page_bytes, count)
            ]
            name = f"{heads.name}, {page_bytes:,} bytes"
            yield _row("copy_pages", name, count, work, 2 * count * page_bytes, copy)


def _moves(arena: Tensor, page_bytes: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Moves of different pages from the lower half of the arena to the upper one."""
    half, rng = arena.numel() // page_bytes // 2, np.random.default_rng(0)
    source, destination = (rng.permutation(half).astype(np.int32) + low for low in (0, half))
    for i in range(min(16, half // count)):
        mine = slice(i * count, (i + 1) * count)
        yield _on(source[mine], arena.device), _on(destination[mine], arena.device)


def _scatters(device: torch.device) -> Iterator[Row]:
    buffer = torch.zeros(_ROWS * _COLUMNS + _IDS, dtype=torch.int32, device=device)
    order = np.random.default_rng(0).permutation(len(buffer)).astype(np.int32)
    for count in (512, 16_384):
        index = _on(order[:count], device)
        yield _row("scatter", "", count, [partial(scatter, buffer, index, index, count)], None, 0.0)


def _translations(device: torch.device) -> Iterator[Row]:
    """All decode: short windows, long contexts; and a step of prefill."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(1, _IDS, _ROWS * _COLUMNS)
    tables = _on(np.concatenate((blocks, rng.permutation(_IDS))).astype(np.int32), device)
    for name, rows, past, window, chunk in (
        ("windows of 512", 256, 2000, 512, 1),
        ("contexts of 8,192", 64, 8191, 8191, 1),
        ("chunks of 2,048", 4, 6144, 6144, 2048),
    ):
        first, end = (past - window) // _PAGE, -(-(past + 1) // _PAGE)
        owner = np.repeat(np.arange(rows), chunk)
        position = past + np.tile(np.arange(chunk), rows)
        page_table = torch.zeros(rows, _COLUMNS, dtype=torch.int32, device=device)
        slots = torch.zeros(rows * chunk, dtype=torch.int64, device=device)
        given = (np.arange(rows), np.full(rows, first), np.full(rows, end), owner, position)
        row, low, high, sequence_of, at = (_on(x.astype(np.int32), device) for x in given)
        work = partial(
            translate, tables, row, low, high, sequence_of, at, page_table, slots,
            table_at=len(blocks), table_size=_IDS, blocks_at=0, block_columns=_COLUMNS, page_size=_PAGE,
            columns=end - first,
        )  # fmt: skip
        yield _row("translate", name, rows, [work], None, 0.0)


def _row(
    kernel: str, what: str, count: int, work: Sequence[Callable[[], None]], nbytes: int | None, copy: float
) -> Row:
    timing = gpu_time(work)
    rate = None if nbytes is None else nbytes / timing.us * 1e6
    return {
        "kernel": kernel,
        "what": what,
        "count": count,
        "us": round(timing.us, 2),
        "gb_per_s": None if rate is None else round(rate / 1e9, 1),
        "of_copy": None if rate is None else round(rate / copy, 3),
        "samples": [round(us, 2) for us in timing.samples],
    }


def _on(array: np.ndarray[Any, np.dtype[np.int32]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
