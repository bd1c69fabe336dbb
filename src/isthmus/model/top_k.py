"""`torch.topk` of compiled layers on a GPU: short rows, as routers of experts have them, by a kernel of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table

from isthmus.kernels import top_k as kernels

Decomposition = Callable[..., Any]

DEVICES = ("cuda",)
"""Types of those that run it."""


class Decompositions(dict[Any, Decomposition]):
    """Inductor's, with `top_k` for `torch.topk`.

    It is pickled as what makes it: Inductor's cache of compiled layers takes a table into the name of what it keeps,
    and keeps nothing where that fails, as it does for functions that are in no module.
    """

    def __reduce__(self) -> tuple[Callable[[], Decompositions], tuple[()]]:
        return decompositions, ()


def decompositions() -> Decompositions:
    """How Inductor takes operators apart, to be handed to it with each graph: the table changes with its options."""
    return Decompositions({**select_decomp_table(), torch.ops.aten.topk.default: top_k})


def top_k(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """`torch.topk` by the kernel, sorted in any case; NotImplemented, which leaves it to torch, where it has none:
    other devices, dtypes, dimensions than the last of several, sizes that are long or known only when it runs."""
    if not (largest and x.device.type in DEVICES and x.dtype in kernels.DTYPES):
        return NotImplemented
    if x.ndim < 2 or dim not in (-1, x.ndim - 1):
        return NotImplemented
    *lead, n = x.shape
    if not (isinstance(n, int) and isinstance(k, int) and 0 < k <= n):  # others are symbols
        return NotImplemented
    if n > kernels.WIDEST or k > kernels.MOST:
        return NotImplemented
    values, indices = torch.ops.isthmus.top_k(x.reshape(-1, n), k)
    return values.view(*lead, k), indices.view(*lead, k)


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    given = x if x.stride(1) == 1 else x.contiguous()
    return kernels.top_k(given, k, early=True)


def _shapes(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], k), x.new_empty((x.shape[0], k), dtype=torch.int64)


_library = torch.library.Library("isthmus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("top_k(Tensor x, int k) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
_library.impl("top_k", _top_k, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("isthmus::top_k", _shapes, lib=_library)
