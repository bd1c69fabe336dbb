"""One copy per step from the host to the device: named arrays packed into one buffer on both sides.

A host buffer is pinned, so the copy returns at once and the device reads the buffer later; it must not be written
again before that. Hence a ring of them, each with an event that its copy records:

    upload i:  wait for the copy of upload i - ring  ->  write host buffer i % ring  ->  copy  ->  record

The device side needs no ring: the copies and the kernels that read them run on one stream, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 16
"""Bytes on which every section starts, so that a kernel meets no alignment it has not been compiled for."""

_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}

Sections: TypeAlias = Mapping[str, NDArray[Any]]

_Places: TypeAlias = list[tuple[str, NDArray[Any], int, int]]
"""Of a layout in a host buffer: name, place, its size, what it is filled with."""


def _align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True, eq=False)
class Layout:
    """Fixed places in the device buffer, for what a CUDA graph reads.

    `places` maps a name to (offset, capacity) in bytes; offsets are multiples of 16. `fills` has what the rest of a
    place is filled with behind a section, 0 where it has nothing. ValueError for places that overlap or are not
    aligned.
    """

    places: Mapping[str, tuple[int, int]]
    fills: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        end = 0
        for name, (offset, capacity) in sorted(self.places.items(), key=lambda item: item[1]):
            if offset < end or offset % ALIGN or capacity < 0:
                raise ValueError(
                    f"place {name!r} at byte {offset} of {capacity} bytes overlaps its neighbour or is not on {ALIGN}"
                )
            end = offset + capacity

    @classmethod
    def of(cls, capacities: Mapping[str, int], fills: Mapping[str, int] | None = None) -> Layout:
        """Places of those capacities in bytes, one behind the other."""
        places, end = {}, 0
        for name, capacity in capacities.items():
            places[name] = (end, capacity)
            end = _align(end + capacity)
        return cls(places, fills or {})

    @cached_property
    def nbytes(self) -> int:
        """Up to the end of the last place, aligned."""
        return _align(max((offset + capacity for offset, capacity in self.places.values()), default=0))


class _Event(Protocol):
    """What of `torch.cuda.Event` a ring needs."""

    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Staging:
    """One host buffer of the ring, and the event of the copy that reads it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._event: _Event | None = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self.array: NDArray[np.uint8] = self.bytes.numpy()
        self._typed = {dtype: self.array.view(dtype) for dtype in _DTYPES}
        self._layouts: dict[Layout, _Places] = {}
        self._part = 0, 0, self.bytes[:0]  # what was copied last: mostly the same place as the time before

    def acquire(self, nbytes: int) -> None:
        """Wait until nobody reads the buffer, and make it at least that large."""
        if self._event is not None:
            self._event.synchronize()
        if nbytes > len(self.array):
            self._allocate(_grown(len(self.array), nbytes))

    def write(self, offset: int, array: NDArray[Any]) -> None:
        """Put an array there, in C order."""
        first = offset // array.itemsize
        self._typed[array.dtype][first : first + array.size] = array.reshape(-1)

    def fill(self, sections: Sections, layout: Layout) -> None:
        """Write every place of the layout: its section, then what it is filled with."""
        places = self._layouts.get(layout)
        if places is None:
            places = self._layouts[layout] = self._places(sections, layout)
        for name, place, size, rest in places:
            array = sections[name]
            n = array.size
            assert n <= size, (
                f"section {name!r} has {array.nbytes} bytes, its place in the layout {place.nbytes}: it cannot grow"
            )
            assert array.dtype == place.dtype
            place[:n] = array if array.ndim == 1 else array.reshape(-1)
            if n < size:
                place[n:] = rest

    def _places(self, sections: Sections, layout: Layout) -> _Places:
        """Of a layout, whose sections have the same dtypes every time."""
        places = []
        for name, (offset, room) in layout.places.items():
            assert name in sections, f"section {name!r} of the layout is missing: a graph would read the last step's"
            dtype = sections[name].dtype
            assert dtype in _DTYPES, f"cannot pack an array of {dtype}"
            first, size = offset // dtype.itemsize, room // dtype.itemsize
            places.append((name, self._typed[dtype][first : first + size], size, layout.fills.get(name, 0)))
        return places

    def copy(self, start: int, end: int, target: _Target) -> None:
        """Enqueue the copy of bytes [start, end) to the start of `target` on the current stream."""
        if end > start:
            if self._part[:2] != (start, end):
                self._part = start, end, self.bytes[start:end]
            target.first(end - start).copy_(self._part[2], non_blocking=True)

    def release(self) -> None:
        """Say that all copies of this round are enqueued."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))


class _Target:
    """A device buffer, and typed views over the whole of it (one view less to make per section)."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._typed = {dtype: self.bytes.view(torch_dtype) for dtype, torch_dtype in _DTYPES.items()}
        self.nbytes = nbytes
        self._first = nbytes, self.bytes

    def first(self, nbytes: int) -> Tensor:
        """Its first bytes: mostly as many as the time before."""
        if self._first[0] != nbytes:
            self._first = nbytes, self.bytes[:nbytes]
        return self._first[1]

    def view(self, offset: int, array: NDArray[Any]) -> Tensor:
        flat = self._typed[array.dtype].narrow(0, offset // array.itemsize, array.size)
        return flat if array.ndim == 1 else flat.view(array.shape)


class Views(Mapping[str, Tensor]):
    """What was uploaded, by name, each view made when it is asked for: of a graph's inputs nobody does."""

    def __init__(
        self, sections: Sections, target: _Target, layout: Layout | None, loose: _Target, at: Mapping[str, int]
    ) -> None:
        self._sections = sections
        self._target, self._fixed = target, {} if layout is None else layout.places
        self._loose, self._at = loose, at  # where the others lie, and from which byte on
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        view = self._made.get(name)
        if view is None:
            array = self._sections[name]
            fixed = name in self._fixed
            view = self._target.view(self._fixed[name][0], array) if fixed else self._loose.view(self._at[name], array)
            self._made[name] = view
        return view

    def __contains__(self, name: object) -> bool:
        return name in self._sections

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)


def _grown(nbytes: int, needed: int) -> int:
    return _align(max(needed, 2 * nbytes))


class Packer:
    """Uploads the arrays of a step in one copy.

    The device buffer of `capacity_bytes` never moves, so a graph may read the places of a `Layout` in it. What does
    not fit behind them goes to a second buffer that grows, in a copy of its own: size the capacity so that it is rare.

    Args:
        device: a CUDA device (pinned host memory, asynchronous copies) or the CPU (plain memory).
        capacity_bytes: of the device buffer, and of each host buffer at first.
        ring: host buffers. With k of them the host may run k uploads ahead of the device before it waits.
    """

    def __init__(self, device: torch.device | str, capacity_bytes: int, ring: int = 3) -> None:
        assert ring > 0
        self.device = torch.device(device)
        capacity = _align(capacity_bytes)
        self._ring = [_Staging(self.device, capacity) for _ in range(ring)]
        self._turn = 0
        self._fixed = _Target(self.device, capacity)
        self._overflow = _Target(self.device, 0)

    def upload(self, sections: Sections, layout: Layout | None = None) -> Views:
        """Views of the device buffer by name, with the arrays' shapes and dtypes, each on 16 bytes.

        Without a layout sections are packed tightly in their order. With one, each of its names must be among the
        sections and fit its place, whose rest is filled (nothing stale in a padding lane); other sections follow
        behind it. The arrays may be changed at once. The views hold, in stream order, until the next upload; upload
        and readers must be on the same stream.

        AssertionError for a dtype other than bool, uint8, int32, int64, float32, float64, and for a layout that a
        section or the device buffer is too small for.
        """
        fixed: Mapping[str, tuple[int, int]] = {} if layout is None else layout.places
        start = end = 0 if layout is None else layout.nbytes
        capacity = self._fixed.nbytes
        assert start <= capacity, f"a layout of {start} bytes in a device buffer of {capacity}"
        at: dict[str, int] = {}
        for name, array in sections.items():
            if name not in fixed:
                assert array.dtype in _DTYPES, f"cannot pack an array of {array.dtype}"
                at[name] = end
                end = _align(end + array.nbytes)
        staging = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        staging.acquire(end)
        if layout is not None:
            staging.fill(sections, layout)
        for name, offset in at.items():
            staging.write(offset, sections[name])
        together = end <= capacity
        staging.copy(0, end if together else start, self._fixed)
        if not together:
            if end - start > self._overflow.nbytes:
                self._overflow = _Target(self.device, _grown(self._overflow.nbytes, end - start))
            staging.copy(start, end, self._overflow)
            at = {name: offset - start for name, offset in at.items()}
        staging.release()
        return Views(sections, self._fixed, layout, self._fixed if together else self._overflow, at)
