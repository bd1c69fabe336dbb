"""What kernels need to know about one layer's pages, read off the two views of the arena."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VECTOR_BYTES = 16
"""Parts of a page begin at multiples of it, and a page is a multiple of it long."""

LIMITS = {torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}
"""The largest finite number of the dtypes that saturate."""


@dataclass(frozen=True)
class Pages:
    """The geometry of `key_pages [P, page_size, kv_heads, k_dim]` and `value_pages [P, page_size, kv_heads, v_dim]`.

    Both are views of one arena: a page's rows are contiguous, pages lie `page_vectors` * 16 bytes apart. Values may be
    the first `v_dim` elements of the very rows of the keys.
    """

    page_size: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_vectors: int
    vector: int  # elements in 16 bytes
    limit: int  # of an fp8 dtype, 0 for others
    shared: bool  # values are the first elements of the keys

    @classmethod
    def of(cls, key_pages: Tensor, value_pages: Tensor) -> Pages:
        """The geometry of these views; they are the layout's own, so a wrong one is a bug."""
        _, page_size, kv_heads, k_dim = key_pages.shape
        v_dim = value_pages.shape[3]
        assert value_pages.shape[:3] == key_pages.shape[:3], "K and V pages of one layer have the same tokens"
        assert value_pages.dtype == key_pages.dtype, "K and V pages of one layer have one dtype"
        assert value_pages.stride(0) == key_pages.stride(0), "K and V rows lie in the same pages"
        shared = value_pages.data_ptr() == key_pages.data_ptr()
        for part, row in ((key_pages, k_dim), (value_pages, k_dim if shared else v_dim)):
            assert stride(part, 1) in (kv_heads * row, 0), "rows of a page are contiguous"
            assert stride(part, 2) in (row, 0), "heads of a row are contiguous"
        page_bytes = key_pages.stride(0) * key_pages.itemsize
        assert page_bytes % VECTOR_BYTES == 0, "pages are multiples of 16 bytes"
        vectors = page_bytes // VECTOR_BYTES
        limit = LIMITS.get(key_pages.dtype, 0)
        return cls(page_size, kv_heads, k_dim, v_dim, vectors, VECTOR_BYTES // key_pages.itemsize, limit, shared)


def stride(x: Tensor, dim: int) -> int:
    """The stride of a dimension, 0 where it has one entry: torch may report anything there, kernels compile for it."""
    return x.stride(dim) if x.shape[dim] > 1 else 0
