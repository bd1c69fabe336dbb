"""States in place: how recurrent layers and convolutions read and write the state pages of a step.

A step is a flat batch of T tokens of S sequences, prefill chunks and decodes mixed, as in `isthmus.engine.step`. A
sequence's state lies in one page; a part of it (a layer's convolution, say) is a strided view `[pages, *shape]` over
the whole arena. An operation takes such views, and the step's tokens, and leaves in the pages the states behind the
last token of each sequence:

    operation(step, view, ..., inputs [T, ...]) -> outputs [T, ...]

Where nothing of a sequence was computed before, its state is zero whatever the bytes of its page are (NaN, for all one
knows). Tensors that depend on the step alone are made once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.memory import Group

Int64 = NDArray[np.int64]

_WORD = torch.complex128
"""16 bytes, at multiples of which parts of a page begin: `index_copy_` of them is three times as fast as of floats."""


@dataclass(frozen=True)
class Grid:
    """A step's longer sequences cut into chunks of `size` tokens each, none of which crosses a sequence's end."""

    size: int
    tokens: Tensor  # int64 [N, size]: of the flat batch; padding repeats the chunk's first token
    into: Tensor  # int64 [N, size]: the same, but padding is one token more than the batch has: where outputs go
    padding: Tensor  # bool [N, size]
    member: Tensor  # int64 [N]: which of `sequences` the chunk is of
    sequences: Tensor  # int64 [M] of the step
    ranks: tuple[tuple[Tensor, Tensor], ...]
    """Per k: the chunks (int64) that are the k-th of their sequences, and those sequences (of the M). States pass from
    rank to rank, so their number is the longest chunk's length over `size`."""


@dataclass(frozen=True)
class Taps:
    """Where the K-wide causal windows of a step's tokens lie in `[state rows, own rows]` of its sequences."""

    own: Tensor  # int64 [T]: where each token's row goes in the extended batch
    old: Tensor  # int64 [S, K - 1]: where each sequence's saved rows go
    last: Tensor  # int64 [S, K - 1]: the rows to save
    rows: int  # T + S * (K - 1)


@dataclass
class StateStep:
    """A step as state operations see it. Tensors are where the states are."""

    query_start: Int64  # [S + 1]
    pages: Tensor  # int64 [S]: physical page of each sequence's state
    fresh: Tensor | None  # bool [S]: its state is zero; None: nobody's is
    starts: Tensor  # int64 [S]: each sequence's first token in the flat batch
    ends: Tensor  # int64 [S]: its last
    decodes: Tensor  # int64: sequences with one token
    chunks: Tensor  # int64: sequences with more
    owner: Tensor  # int64 [T]: the sequence of each token
    upload: Callable[[NDArray[Any]], Tensor] = torch.from_numpy  # an array to where the states are
    _grids: dict[int, Grid] = field(default_factory=dict)  # by chunk size
    _windows: dict[int, Taps] = field(default_factory=dict)  # by width

    @classmethod
    def of(cls, query_start: Int64, past: Int64, pages: Int64) -> Self:
        """query_start `[S + 1]`, past `[S]` as in `Step`; pages `[S]` physical. IndexError for a missing page."""
        if not pages.all():
            raise IndexError("a sequence of the step has no state page (physical page 0)")
        counts, fresh = np.diff(query_start), past == 0
        return cls(
            query_start,
            torch.from_numpy(pages),
            torch.from_numpy(fresh) if fresh.any() else None,
            torch.from_numpy(query_start[:-1]),
            torch.from_numpy(query_start[1:] - 1),
            torch.from_numpy(np.flatnonzero(counts == 1)),
            torch.from_numpy(np.flatnonzero(counts > 1)),
            torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        )

    @property
    def only_decodes(self) -> bool:
        """Has every sequence one token?"""
        return len(self.chunks) == 0

    def load(self, view: Tensor, sequences: Tensor | None = None) -> Tensor:
        """A copy of the states `[S, *shape]`, or of some sequences'; zeros where they are fresh."""
        pages, fresh = self.pages, self.fresh
        if sequences is not None:
            pages, fresh = pages[sequences], None if fresh is None else fresh[sequences]
        states = view.index_select(0, pages)
        if fresh is not None:
            states.masked_fill_(fresh.view(-1, *(1,) * (states.dim() - 1)), 0)
        return states

    def store(self, view: Tensor, states: Tensor, sequences: Tensor | None = None) -> None:
        """Put the states back, rounded to the page's dtype."""
        pages = self.pages if sequences is None else self.pages[sequences]
        states = states.to(view.dtype)
        if view.shape[-1] * view.itemsize % _WORD.itemsize == 0:
            view, states = view.view(_WORD), states.contiguous().view(_WORD)
        view.index_copy_(0, pages, states)

    def grid(self, size: int) -> Grid:
        """Chunks of `size` tokens of the sequences with more than one."""
        made = self._grids.get(size)
        if made is None:
            made = self._grids[size] = self._grid(size)
        return made

    def taps(self, width: int) -> Taps:
        """Windows of `width` tokens of all sequences."""
        made = self._windows.get(width)
        if made is None:
            made = self._windows[width] = self._taps(width)
        return made

    def _grid(self, size: int) -> Grid:
        counts, total = np.diff(self.query_start), self.query_start[-1]
        sequences = np.flatnonzero(counts > 1)
        per = -(-counts[sequences] // size)
        member = np.repeat(np.arange(len(sequences)), per)
        rank = np.arange(per.sum()) - np.repeat(np.cumsum(per) - per, per)
        first = self.query_start[sequences][member] + rank * size
        offset = np.arange(size)
        padding = offset >= (self.query_start[sequences + 1][member] - first)[:, None]
        tokens = first[:, None] + np.where(padding, 0, offset)
        order = np.argsort(rank, kind="stable")
        ranks = np.split(order, np.cumsum(np.bincount(rank))[:-1]) if len(order) else []
        in_order = (x for chunks in ranks for x in (chunks, member[chunks]))
        arrays = (tokens, np.where(padding, total, tokens), member, *in_order)
        of_batch, into, owner, *rest = self._together(arrays)
        pairs = tuple(zip(rest[::2], rest[1::2], strict=True))
        return Grid(size, of_batch, into, into == int(total), owner, self.chunks, pairs)

    def _taps(self, width: int) -> Taps:
        counts, keep = np.diff(self.query_start), width - 1
        ends = np.cumsum(counts + keep)
        begins = ends - counts - keep
        own = np.arange(self.query_start[-1]) + keep * np.repeat(np.arange(1, len(counts) + 1), counts)
        step = np.arange(keep)
        own_, old, last = self._together((own, begins[:, None] + step, ends[:, None] - keep + step))
        return Taps(own_, old, last, int(ends[-1]))

    def _together(self, arrays: Sequence[Int64]) -> list[Tensor]:
        """Those arrays in one upload."""
        flat = self.upload(np.concatenate([x.ravel() for x in arrays]))
        parts = torch.split(flat, [x.size for x in arrays])
        return [part.view(x.shape) for part, x in zip(parts, arrays, strict=True)]


def state_view(arena: Tensor, group: Group, name: str) -> Tensor:
    """The part `name` of every page of `group` over `arena` (uint8 [bytes]): `[pages, *shape]`, in place."""
    part = group.spec.part(name)
    dtype: torch.dtype = getattr(torch, part.dtype)
    pages = arena.numel() // group.spec.page_bytes
    flat = arena[: pages * group.spec.page_bytes].view(dtype)
    inner = np.cumprod([1, *part.shape[::-1]])[-2::-1].tolist()
    stride = group.spec.page_bytes // dtype.itemsize
    return flat.as_strided((pages, *part.shape), (stride, *inner), part.offset // dtype.itemsize)


def causal_conv(step: StateStep, view: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution: `out[t] = bias + sum_k weight[:, k] * x[t - (K - 1) + k]`, per channel.

    Args:
        view: `[pages, K - 1, C]`, the last inputs of each sequence, oldest first.
        x: `[T, C]`.
        weight: `[C, K]`.
        bias: `[C]`.

    Returns `[T, C]` in x's dtype; sums are fp32.
    """
    width = weight.shape[1]
    old, taps = step.load(view).to(x.dtype), weight.t().float()
    if step.only_decodes:
        window = torch.cat((old, x[:, None]), 1)  # in the order of the sequences, which is that of their tokens
        step.store(view, window[:, 1:])
        out = (window * taps).sum(1)
    else:
        where = step.taps(width)
        extended = x.new_empty(where.rows, x.shape[1])
        extended[where.own] = x
        extended[where.old.flatten()] = old.flatten(0, 1)
        step.store(view, extended[where.last])
        out = extended[where.own] * taps[width - 1]
        for k in range(width - 1):
            out.addcmul_(extended[where.own - (width - 1 - k)], taps[k])
    return (out if bias is None else out + bias).to(x.dtype)
