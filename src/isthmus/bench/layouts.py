"""Where the rows of several layers may lie in an arena: the design's pages, and what they are compared with.

page-major          one page holds all layers, rows layer-major: [page][layer][k|v][token][head][dim]; the design
page-major by token the same bytes, but looked up token by token: what the lookups of the next one cost by themselves
token-major         one page holds all layers, rows token-major: [page][token][layer][k|v][head][dim]
layer buffers       a buffer for each layer's K and one for its V: [layer][k|v][page][token][head][dim]

The kernels take pages whose rows are contiguous, so the two in the middle are given as pages of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Layout = Literal["page-major", "page-major by token", "token-major", "layer buffers"]
LAYOUTS: tuple[Layout, ...] = ("page-major", "page-major by token", "token-major", "layer buffers")

DTYPE = torch.bfloat16
ITEMSIZE = 2


@dataclass(frozen=True)
class Heads:
    """Attention of one layer group of a model."""

    name: str
    kv_heads: int
    group: int  # query heads per KV head
    dim: int
    layers: int  # in a page
    rows: torch.dtype = DTYPE  # of K and V as pages hold them

    @property
    def heads(self) -> int:
        """Of the query."""
        return self.kv_heads * self.group

    @property
    def row_bytes(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.kv_heads * self.dim * self.rows.itemsize


@dataclass(frozen=True)
class Placed:
    """The cached rows of some sequences, as the kernels take them."""

    layers: Sequence[tuple[Tensor, Tensor]]  # key_pages, value_pages [P, tokens of a page, kv_heads, dim]
    page_table: NDArray[np.int32]  # [sequences, columns]

    @property
    def page_size(self) -> int:
        """Tokens of a page, as the kernels see it."""
        return int(self.layers[0][0].shape[1])


def place(
    arena: Tensor, heads: Heads, layout: Layout, page_size: int, first: NDArray[np.int64], end: NDArray[np.int64]
) -> Placed:
    """Give sequences pages for their cached tokens [first, end), scattered at random over the start of the arena.

    As many of the layers are there as fit. ValueError if not even one does.
    """
    low, high = first // page_size, -(-end // page_size)
    columns = np.arange(int(high.max()))
    wanted = (columns >= low[:, None]) & (columns < high[:, None])
    pages = int(wanted.sum()) + 1  # and the null page
    layers = min(heads.layers, arena.numel() // (pages * page_size * heads.row_bytes))
    if layers == 0:
        raise ValueError(f"{pages:,} pages of {page_size} tokens do not fit an arena of {arena.numel():,} bytes")
    table = np.zeros(wanted.shape, np.int32)
    table[wanted] = 1 + np.random.default_rng(0).permutation(pages - 1)
    flat = arena[: pages * page_size * heads.row_bytes * layers].view(heads.rows)
    views, page_tokens = _views(flat, heads, layout, page_size, pages, layers)
    return Placed(views, table if page_tokens is None else _by_token(table, page_size, page_tokens))


def _views(
    flat: Tensor, heads: Heads, layout: Layout, page_size: int, pages: int, layers: int
) -> tuple[list[tuple[Tensor, Tensor]], int | None]:
    """Key and value views of every layer; and, where they are by token, the views' pages per page."""
    row = heads.kv_heads * heads.dim
    part = page_size * row  # K of one layer in a page, in elements
    inside = (row, heads.dim, 1)
    by_token = flat.numel() // row - (2 * layers - 1) * page_size
    # Pages of a view, their tokens, the elements from page to page, and those from one part to the next.
    count, tokens, stride, unit = {
        "page-major": (pages, page_size, 2 * layers * part, part),
        "page-major by token": (by_token, 1, row, part),
        "token-major": (pages * page_size, 1, 2 * layers * row, row),
        "layer buffers": (pages, page_size, part, pages * part),
    }[layout]
    shape = (count, tokens, heads.kv_heads, heads.dim)
    parts = [flat.as_strided(shape, (stride, *inside), i * unit) for i in range(2 * layers)]
    page_tokens = {"page-major by token": 2 * layers * page_size, "token-major": page_size}.get(layout)
    return list(zip(parts[::2], parts[1::2], strict=True)), page_tokens


def _by_token(table: NDArray[np.int32], page_size: int, page_tokens: int) -> NDArray[np.int32]:
    """A page table for pages of one token, of which a page has `page_tokens`, its own first."""
    places = table.astype(np.int64)[:, :, None] * page_tokens + np.arange(page_size)
    assert places.max() < 2**31
    return places.reshape(len(table), -1).astype(np.int32)
