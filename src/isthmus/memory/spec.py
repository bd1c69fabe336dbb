"""Byte arithmetic of one group's page: pure integers, no device, no framework.

A page is one contiguous envelope of all the layers of a group, so one copy moves it:

    [layer 0: k rows | v rows] [layer 1: k rows | v rows] ... pad to 16 B        a token page
    [layer 0: conv | recurrent] [layer 1: conv | recurrent] ... pad to 16 B      a state page

Rows are layer-major: inside a page the `page_size` tokens of one layer's K lie together, so every
layer's view over the whole arena is `[pages, page_size, heads, dim]` with one page stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

ALIGN = 16
"""Bytes. Every part starts on it and every page is a multiple of it, so vector loads never straddle."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of the dtypes a page can hold."""


def _align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True)
class Part:
    """One array inside a page: what one layer keeps there under one name."""

    name: str  # "<layer>.<what>", unique in the page: "5.k", "5.v", "0.conv"
    shape: tuple[int, ...]  # of one page: (page_size, heads, dim) for tokens, the state's own shape for states
    dtype: str  # a key of ITEMSIZE
    offset: int  # bytes from the start of the page, a multiple of ALIGN

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class PageSpec:
    """The layout of one page. `page_size` is tokens per page; 1 for a state page (one sequence's state)."""

    page_size: int
    page_bytes: int  # a multiple of ALIGN
    parts: tuple[Part, ...]  # ascending offset, no overlap

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.page_bytes < ALIGN or self.page_bytes % ALIGN:
            raise ValueError(f"page_bytes must be a positive multiple of {ALIGN}, not {self.page_bytes}")
        end = 0
        for part in self.parts:
            if part.offset < end or part.offset % ALIGN:
                raise ValueError(f"part {part.name!r} at byte {part.offset} overlaps its neighbour or is not aligned")
            end = part.offset + part.nbytes
        if end > self.page_bytes:
            raise ValueError(f"parts end at byte {end}, past the page's {self.page_bytes}")

    def part(self, name: str) -> Part:
        """The part of that name. KeyError if the page has none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def token_bytes(self) -> float:
        """Bytes a token costs in this group, padding included."""
        return self.page_bytes / self.page_size


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer caches per token: GQA rows, or one latent row (`v_dim` 0) for MLA."""

    layer: int
    kv_heads: int  # on this rank
    k_dim: int
    v_dim: int  # 0: V is a view of the K row (MLA latent)
    dtype: str = "bfloat16"


def pack(parts: Iterable[tuple[str, tuple[int, ...], str]], page_size: int) -> PageSpec:
    """Lay `(name, shape, dtype)` arrays one behind the other, each aligned; the page ends aligned."""
    placed: list[Part] = []
    end = 0
    for name, shape, dtype in parts:
        placed.append(Part(name, shape, dtype, _align(end)))
        end = placed[-1].offset + placed[-1].nbytes
    return PageSpec(page_size, max(ALIGN, _align(end)), tuple(placed))


def kv_spec(layers: Sequence[LayerKV], page_size: int) -> PageSpec:
    """A token page: `<layer>.k` of shape `[page_size, kv_heads, k_dim]` and `<layer>.v` likewise, per layer."""
    parts: list[tuple[str, tuple[int, ...], str]] = []
    for kv in layers:
        parts.append((f"{kv.layer}.k", (page_size, kv.kv_heads, kv.k_dim), kv.dtype))
        if kv.v_dim:
            parts.append((f"{kv.layer}.v", (page_size, kv.kv_heads, kv.v_dim), kv.dtype))
    return pack(parts, page_size)


def state_spec(parts: Iterable[tuple[str, tuple[int, ...], str]]) -> PageSpec:
    """A state page: one sequence's state of all layers; each part keeps its own shape and dtype."""
    return pack(parts, page_size=1)


def opaque_spec(page_bytes: int, page_size: int = 1) -> PageSpec:
    """A page of so many bytes without parts: for planning and tests, where nobody reads the bytes."""
    return PageSpec(page_size, page_bytes, ())
