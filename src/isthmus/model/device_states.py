"""Layers with states on a device: one opaque operator that reads and writes state pages in place.

It is opaque for the reasons that attention is (`isthmus.model.device_attention`): a layer compiles to one graph around
it, whatever its number, and what an operation does depends on the step, not on shapes. Which operation, and on which
parts of the state, is compiled in; the layer's number and the executor travel as CPU tensors.

Sequences with one token go through kernels that change their states where they lie, and those with several where there
is such a kernel; everything else is the CPU's operation, whose tensor operators run anywhere. In a step of sequences
with one token nothing looks at the host, and all tensors have fixed places, so that a CUDA graph can hold it; a graph
holds those with several where chunks of any lengths are the same launches (`Operation.fixed`). To give an operation a
kernel: a function here with the operation's signature, and its name in `OPERATIONS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.kernels.causal_conv_decode import causal_conv_decode
from isthmus.kernels.causal_conv_varlen import causal_conv_varlen
from isthmus.kernels.delta_chunks import delta_chunks
from isthmus.kernels.gated_delta_decode import gated_delta_decode
from isthmus.kernels.rglru import rglru
from isthmus.kernels.rglru_decode import rglru_decode
from isthmus.kernels.scan_decode import scan_decode
from isthmus.kernels.selective_scan import selective_scan
from isthmus.kernels.ssd_chunks import lightning_chunks, ssd_chunks
from isthmus.kernels.ssd_decode import lightning_decode, ssd_decode
from isthmus.kernels.states import Int64, StateStep
from isthmus.model.device_attention import TAG
from isthmus.model.mixers.base import Mixer
from isthmus.model.state_batch import Views


class Lanes(NamedTuple):
    """Sequences with one token, as kernels take them."""

    pages: Tensor  # int64 [n], 0: padding
    fresh: Tensor  # bool [n]
    tokens: Tensor  # int64 [n]


@dataclass
class DeviceStep(StateStep):
    """A step whose tensors are on a device. `fresh` is there always; padding has page 0, and is fresh."""

    early: bool = False
    """May kernels for sequences with one token begin before the one before them has ended? Not with chunks beside them:
    `lanes` is written between two kernels of a layer then, too late for them (`isthmus.kernels.dependent`)."""

    @cached_property
    def lanes(self) -> Lanes:
        """Of `decodes`."""
        assert self.fresh is not None
        every = Lanes(self.pages, self.fresh, self.starts)
        return every if self.only_decodes else Lanes(*(x.index_select(0, self.decodes) for x in every))

    @property
    def several(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Sequences with several tokens, as kernels take them: of all pages, fresh, first and last token; and which."""
        assert self.fresh is not None
        return self.pages, self.fresh, self.starts, self.ends, self.chunks


@dataclass(frozen=True)
class StateInputs:
    """What a forward reads to know a step's states; S sequences, padding among them."""

    query_start: Int64  # [S + 1], on the host; empty for a graph of steps with chunks
    entry: Tensor  # int32 [S]: of the buffer of tables, holds the physical page
    fresh: Tensor  # bool [S]
    starts: Tensor  # int64 [S]
    ends: Tensor  # int64 [S]
    decodes: Tensor  # int64
    chunks: Tensor  # int64
    owner: Tensor  # int64 [T]: the sequence of each token

    def step(self, tables: Tensor, *, early: bool) -> DeviceStep:
        """With ids made physical. `early`: kernels may begin before the one before them has ended."""
        pages = tables.index_select(0, self.entry).long()
        where = self.starts, self.ends, self.decodes, self.chunks, self.owner
        upload, early = partial(_upload, tables.device), early and len(self.chunks) == 0
        return DeviceStep(self.query_start, pages, self.fresh, *where, upload, early=early)


def _upload(device: torch.device, array: NDArray[Any]) -> Tensor:
    """A copy that nobody waits for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class DeviceStates:
    """What mixers read and write, for one executor (`isthmus.model.mixers.base.Mix`).

    `step` changes with every step; everything else stays, so that compiled layers and captured graphs stay valid.
    """

    def __init__(self, views: Views) -> None:
        self.step: DeviceStep | None = None
        self._views = views
        self.chunks_in_graphs = True
        """Can a graph run steps with chunks? As far as the operations go that layers have asked for until now."""
        self.handle = torch.tensor(id(self), device="cpu")  # unique among those alive
        _alive[id(self)] = self

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """See `Mix`."""
        return mixer.mix(hidden[0], _Layer(getattr(mixer.module, TAG), self.handle))[None]

    def run(
        self,
        operation: str,
        layer: int,
        parts: Sequence[str],
        inputs: Sequence[Tensor | None],
        settings: Mapping[str, object],
    ) -> Tensor:
        """One operation of one layer. parts: of the state, by argument; "" where the next of the inputs is meant."""
        views, rest = self._views[layer], iter(inputs)
        given = [views[part] if part else next(rest) for part in parts]
        how = OPERATIONS[operation]
        self.chunks_in_graphs &= how.fixed
        return how.run(self.step, *given, **settings)


@dataclass(frozen=True)
class _Layer:
    """The states of one layer (`isthmus.model.mixers.base.LayerStates`)."""

    layer: Tensor
    handle: Tensor

    def apply(self, operation: Callable[..., Tensor], *parts_and_inputs: Any, **settings: tuple[float, ...]) -> Tensor:
        """See `LayerStates`; an operation is known by its name, and settings are tuples of numbers."""
        parts = [x if isinstance(x, str) else "" for x in parts_and_inputs]
        inputs = [x for x in parts_and_inputs if not isinstance(x, str)]
        names, sizes = list(settings), [len(x) for x in settings.values()]
        values = [float(x) for some in settings.values() for x in some]
        out: Tensor = torch.ops.isthmus.state(
            inputs, parts, operation.__name__, names, sizes, values, self.layer, self.handle
        )
        return out


_alive: weakref.WeakValueDictionary[int, DeviceStates] = weakref.WeakValueDictionary()
"""Which object a call of the operator is for: operators take numbers and tensors alone."""


# -- operations -------------------------------------------------------------------------------------------------


def _conv(step: DeviceStep, view: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `isthmus.kernels.states.causal_conv`."""
    x, weight = _by_token(x), weight.contiguous()
    if not step.only_decodes:
        assert step.fresh is not None
        return causal_conv_varlen(view, step.pages, step.fresh, step.starts, step.ends, step.owner, x, weight, bias)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    causal_conv_decode(view, *step.lanes, x, weight, bias, out, early=step.early)
    return out


def _delta(
    step: DeviceStep, view: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """As `isthmus.kernels.gated_delta.gated_delta_rule`, or by decay's shape `isthmus.kernels.kda.kimi_delta_rule`."""
    query, key, value, decay, beta = (_by_token(x) for x in (query, key, value, decay, beta))
    given = query, key, value, decay, beta
    out = torch.empty_like(value, dtype=query.dtype, memory_format=torch.contiguous_format)
    gated_delta_decode(view, *step.lanes, *given, out, early=step.early)
    delta_chunks(view, step.several, step.owner, *given, out)
    return out


def _ssd(
    step: DeviceStep,
    view: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    skip: Tensor,
    *,
    limit: tuple[float, float],
) -> Tensor:
    """As `isthmus.kernels.ssd.ssd`."""
    query, key, value = (_by_head(x) for x in (query, key, value))
    given = query, key, value, _by_token(dt), dt_bias, rate, skip
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    ssd_decode(view, *step.lanes, *given, out, limit=limit, early=step.early)
    ssd_chunks(view, step.several, *given, out, limit=limit)
    return out


def _lightning(step: DeviceStep, view: Tensor, query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """As `isthmus.kernels.lightning.lightning_attention`."""
    query, key, value = (_by_head(x) for x in (query, key, value))
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    lightning_decode(view, *step.lanes, query, key, value, slope, out, early=step.early)
    lightning_chunks(view, step.several, query, key, value, slope, out)
    return out


def _scan(
    step: DeviceStep, view: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, skip: Tensor
) -> Tensor:
    """As `isthmus.kernels.selective_scan.selective_scan`; with chunks among them all sequences go through it."""
    if not step.only_decodes:
        return selective_scan(step, view, x, dt, b, c, rate, skip)
    x, dt, b, c = (_by_token(t) for t in (x, dt, b, c))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    scan_decode(view, *step.lanes, x, dt, b, c, rate.contiguous(), skip.contiguous(), out, early=step.early)
    return out


def _rglru(step: DeviceStep, view: Tensor, x: Tensor, decay: Tensor) -> Tensor:
    """As `isthmus.kernels.rglru.rglru`; with chunks among them all sequences go through it."""
    if not step.only_decodes:
        return rglru(step, view, x, decay)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rglru_decode(view, *step.lanes, _by_token(x), _by_token(decay), out, early=step.early)
    return out


def _by_head(x: Tensor) -> Tensor:
    """With each head's numbers contiguous."""
    return x if x[0, 0].is_contiguous() else x.contiguous()


def _by_token(x: Tensor) -> Tensor:
    """With each token's numbers contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


@dataclass(frozen=True)
class Operation:
    """An operation as a device runs it."""

    run: Callable[..., Tensor]  # (step, views and inputs, **settings)
    shape: int  # which of the inputs has the output's shape
    dtype: int  # which has its dtype
    fixed: bool = False  # are chunks of any lengths the same launches?


OPERATIONS: Mapping[str, Operation] = {
    "causal_conv": Operation(_conv, 0, 0, fixed=True),
    "gated_delta_rule": Operation(_delta, 2, 0, fixed=True),
    "kimi_delta_rule": Operation(_delta, 2, 0, fixed=True),
    "ssd": Operation(_ssd, 2, 2, fixed=True),
    "lightning_attention": Operation(_lightning, 2, 2, fixed=True),
    "selective_scan": Operation(_scan, 0, 0),
    "rglru": Operation(_rglru, 0, 0),
}
"""By name: what mixers ask for."""


def _state(
    inputs: Sequence[Tensor | None],
    parts: Sequence[str],
    operation: str,
    names: Sequence[str],
    sizes: Sequence[int],
    values: Sequence[float],
    layer: Tensor,
    handle: Tensor,
) -> Tensor:
    ends = np.cumsum(sizes).tolist()
    settings = {name: tuple(values[end - n : end]) for name, n, end in zip(names, sizes, ends, strict=True)}
    return _alive[int(handle)].run(operation, int(layer), parts, inputs, settings)


def _shape_of(inputs: Sequence[Tensor | None], parts: Sequence[str], operation: str, *others: Any) -> Tensor:
    kind = OPERATIONS[operation]
    shape, dtype = inputs[kind.shape], inputs[kind.dtype]
    assert shape is not None
    assert dtype is not None
    return shape.new_empty(shape.shape, dtype=dtype.dtype)


_library = torch.library.Library("isthmus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "state(Tensor?[] inputs, str[] parts, str operation, str[] names, int[] sizes, float[] values, Tensor layer, "
    "Tensor handle) -> Tensor"
)
_library.impl("state", _state, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("isthmus::state", _shape_of, lib=_library)
