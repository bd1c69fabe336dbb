"""Attention layers on a device: one opaque operator that writes a step's rows into the arena and reads it.

The operator is opaque so that a layer compiles to one graph around it, whatever its number: the number travels as a
CPU tensor that hangs on the module (`tag`), because a Python number would be compiled in, once per layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.kernels.attention import (
    DecodeItems,
    PrefillTiles,
    Workspace,
    decode_attention,
    prefill_attention,
    write_kv,
)
from isthmus.kernels.reference import Scoring
from isthmus.memory import Group
from isthmus.model.latent import LATENT

TAG = "isthmus_layer"
"""Buffer of an attention module: int64 [], on the CPU, the layer it is."""


@dataclass(frozen=True)
class LayerPages:
    """Where one layer's rows lie: strided views `[pages, page_size, kv_heads, dim]` over the arena."""

    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, arena: Tensor, group: Group, layer: int, rank: int | None = None) -> LayerPages:
        """The parts `<layer>.k` and `<layer>.v` of every page of `group` in `arena` (uint8 [bytes]).

        rank: values are the first so many elements of the keys, and have no part of their own (MLA).
        """
        key = _part(arena, group, f"{layer}.k")
        return cls(key, key[..., :rank] if rank is not None else _part(arena, group, f"{layer}.v"))


def _part(arena: Tensor, group: Group, name: str) -> Tensor:
    part = group.spec.part(name)
    dtype: torch.dtype = getattr(torch, part.dtype)
    page_size, heads, dim = part.shape
    pages = arena.numel() // group.spec.page_bytes
    flat = arena[: pages * group.spec.page_bytes].view(dtype)
    stride = group.spec.page_bytes // dtype.itemsize
    return flat.as_strided((pages, page_size, heads, dim), (stride, heads * dim, dim, 1), part.offset // dtype.itemsize)


@dataclass(frozen=True)
class GroupStep:
    """What the layers of one group need to know about a step, on the device."""

    slots: Tensor  # int64 [T]: where each token's rows go, -1: nowhere
    page_table: Tensor  # int32 [S, columns]: physical pages
    items: DecodeItems | None  # sequences with one token; None: there are none
    tiles: PrefillTiles | None  # sequences with more


class DeviceBatch:
    """What attention layers read and write, for one executor (`isthmus.model.attention.Attend`).

    `step` changes with every step; everything else stays, so that compiled layers and captured graphs stay valid.
    """

    def __init__(
        self,
        layer_group: Mapping[int, str],
        owner: Mapping[int, int],
        pages: Mapping[int, LayerPages],
        workspace: Workspace,
        *,
        early: bool,
    ) -> None:
        self.step: Mapping[str, GroupStep] = {}  # by group
        self.positions = torch.empty(0, dtype=torch.int64)  # [T], of the step
        self._layer_group = layer_group
        self._owner = owner
        self._pages = pages
        self._workspace = workspace
        self._early = early  # see `write_kv`
        self.handle = _register(self)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Scoring,
        window: int | None,
        others: Mapping[str, object],
    ) -> Tensor:
        """See `Attend`. The window is the group's; the layout was derived from the same call."""
        layer, softcap = getattr(module, TAG), how.softcap or 0.0
        out: Tensor = torch.ops.isthmus.attend(
            query, key, value, layer, how.sinks, how.relative, how.scaling, softcap, self.handle
        )
        return out

    def run(self, query: Tensor, key: Tensor, value: Tensor, layer: int, how: Scoring) -> Tensor:
        """query `[T, heads, k_dim]`, key and value `[T, kv_heads, dim]` -> `[T, heads, v_dim]`."""
        group = self._layer_group[layer]
        owner, step = self._owner[layer], self.step[group]
        pages = self._pages[owner]
        if owner == layer:
            write_kv(key, value, pages.key, pages.value, step.slots, early=self._early)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        if step.items is not None:
            single = (query, out, pages.key, pages.value, step.page_table, step.items, self._workspace, how)
            decode_attention(*single, early=self._early)
        if step.tiles is not None:
            given, cached = (query, out, key, value), (pages.key, pages.value, step.page_table)
            prefill_attention(*given, *cached, step.tiles, self._workspace, how)
        return out


_batches: weakref.WeakValueDictionary[int, DeviceBatch] = weakref.WeakValueDictionary()
"""Which object a call of the operator is for: operators take numbers and tensors alone. Written by `_register`."""


def _register(batch: DeviceBatch) -> Tensor:
    handle = id(batch)  # unique among those alive
    _batches[handle] = batch
    return torch.tensor(handle, device="cpu")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    sinks: Tensor | None,
    relative: Tensor | None,
    scaling: float,
    softcap: float,
    handle: Tensor,
) -> Tensor:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    how = Scoring(scaling, softcap or None, sinks, relative)
    return _batches[int(handle)].run(query, key, value, int(layer), how)[None]


def _shape_of(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


# Defined by hand: the wrapper of `torch.library.custom_op` costs more at each call than the kernels it launches.
_library = torch.library.Library("isthmus", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor key, Tensor value, Tensor layer, Tensor? sinks, Tensor? relative, float scaling, "
    "float softcap, Tensor handle) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("isthmus::attend", _shape_of, lib=_library)


def tag(model: nn.Module) -> None:
    """Hang its number on every module that knows its layer; afterwards the model must not change device."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            hang(module, layer)


def hang(module: nn.Module, layer: int) -> None:
    """Hang the number of its layer on a module."""
    module.register_buffer(TAG, torch.tensor(layer, device="cpu"), persistent=False)


def latent_ranks(model: nn.Module) -> dict[int, int]:
    """Of each layer whose values are the first elements of its keys: how many (`isthmus.model.latent`)."""
    latent = ((module, getattr(module, LATENT, None)) for module in model.modules())
    return {module.layer_idx: found.rank for module, found in latent if found is not None}  # type: ignore[misc]
