"""Layers with states on a device: one opaque operator that reads and writes state pages in place.

It is opaque for the reasons that attention is (`isthmus.model.device_attention`): a layer compiles to one graph around
it, whatever its number, and what an operation does depends on the step, not on shapes. Which operation, and on which
parts of the state, is compiled in; the layer's number and the executor travel as CPU tensors.

Sequences with one token go through kernels that change their states where they lie, where there is such a kernel;
everything else is the CPU's operation, whose tensor operators run anywhere. In a step of such sequences alone nothing
looks at the host, and all tensors have fixed places, so that a CUDA graph can hold it. To give an operation a kernel:
a function here with the operation's signature, and its name in `OPERATIONS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.kernels.causal_conv_decode import causal_conv_decode
from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.gated_delta_decode import gated_delta_decode
from isthmus.kernels.kda import kimi_delta_rule
from isthmus.kernels.lightning import lightning_attention
from isthmus.kernels.rglru import rglru
from isthmus.kernels.selective_scan import selective_scan
from isthmus.kernels.ssd import ssd
from isthmus.kernels.states import Int64, StateStep, causal_conv
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

    @cached_property
    def lanes(self) -> Lanes:
        """Of `decodes`."""
        assert self.fresh is not None
        every = Lanes(self.pages, self.fresh, self.starts)
        return every if self.only_decodes else Lanes(*(x.index_select(0, self.decodes) for x in every))

    @cached_property
    def of_chunks(self) -> DeviceStep:
        """The same, but for operations that take sequences with one token apart: without those."""
        return replace(self, decodes=self.decodes[:0])


@dataclass(frozen=True)
class StateInputs:
    """What a forward reads to know a step's states; S sequences, padding among them."""

    query_start: Int64  # [S + 1], on the host
    entry: Tensor  # int32 [S]: of the buffer of tables, holds the physical page
    fresh: Tensor  # bool [S]
    starts: Tensor  # int64 [S]
    ends: Tensor  # int64 [S]
    decodes: Tensor  # int64
    chunks: Tensor  # int64

    def step(self, tables: Tensor) -> DeviceStep:
        """With ids made physical."""
        pages = tables.index_select(0, self.entry).long()
        upload = partial(_upload, tables.device)
        return DeviceStep(
            self.query_start, pages, self.fresh, self.starts, self.ends, self.decodes, self.chunks, upload
        )


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
        given = (views[part] if part else next(rest) for part in parts)
        return OPERATIONS[operation].run(self.step, *given, **settings)


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
    """As `causal_conv`; with chunks among them all sequences go through it."""
    if not step.only_decodes:
        return causal_conv(step, view, x, weight, bias)
    x = _by_token(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    causal_conv_decode(view, *step.lanes, x, weight.contiguous(), bias, out)
    return out


def _delta(
    rule: Callable[..., Tensor],
    step: DeviceStep,
    view: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
) -> Tensor:
    """As `rule`, one of the delta rules."""
    query, key, value, decay, beta = (_by_token(x) for x in (query, key, value, decay, beta))
    if step.only_decodes:
        out = value.new_empty(value.shape, dtype=query.dtype)
    else:
        out = rule(step.of_chunks, view, query, key, value, decay, beta)
    gated_delta_decode(view, *step.lanes, query, key, value, decay, beta, out)
    return out


def _by_token(x: Tensor) -> Tensor:
    """With each token's numbers contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


@dataclass(frozen=True)
class Operation:
    """An operation as a device runs it."""

    run: Callable[..., Tensor]  # (step, views and inputs, **settings)
    shape: int  # which of the inputs has the output's shape
    dtype: int  # which has its dtype


OPERATIONS: Mapping[str, Operation] = {
    "causal_conv": Operation(_conv, 0, 0),
    "gated_delta_rule": Operation(partial(_delta, gated_delta_rule), 2, 0),
    "kimi_delta_rule": Operation(partial(_delta, kimi_delta_rule), 2, 0),
    "ssd": Operation(ssd, 2, 2),
    "lightning_attention": Operation(lightning_attention, 2, 2),
    "selective_scan": Operation(selective_scan, 0, 0),
    "rglru": Operation(rglru, 0, 0),
}
"""By name: what mixers ask for. Chunks that another library computes faster would be another `run`."""


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
