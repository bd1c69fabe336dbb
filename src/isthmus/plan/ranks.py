"""Layer groups under another accounting: split over ranks, or with every layer storing rows of its own."""

from __future__ import annotations

import dataclasses

from isthmus.errors import ConfigError
from isthmus.memory import Group, Part
from isthmus.memory.spec import pack
from isthmus.model.layout import ModelLayout


def per_rank(layout: ModelLayout, ranks: int) -> ModelLayout:
    """The same model on one of `ranks` that split its heads: `max(1, heads // ranks)` of each layer's are here.

    A convolution's state is split by its channels (its last dimension), any other state by its heads (its first).
    ConfigError naming group and layer if the heads do not divide.
    """
    groups = tuple(
        _packed(group, [(part.name, _split(group, part, ranks), part.dtype) for part in group.spec.parts])
        for group in layout.groups
    )
    return dataclasses.replace(layout, groups=groups)


def every_layer(layout: ModelLayout) -> dict[str, Group]:
    """The groups as they would be if layers that read another layer's rows stored a copy: what many engines count."""
    groups = {}
    for group in layout.groups:
        rows: dict[int, list[Part]] = {}
        for part in group.spec.parts:
            rows.setdefault(layer_of(part), []).append(part)
        copies = [
            (f"{reader}.{part.name.partition('.')[2]}", part.shape, part.dtype)
            for reader, owner in sharing(layout, group).items()
            for part in rows[owner]
        ]
        own = [(part.name, part.shape, part.dtype) for part in group.spec.parts]
        groups[group.name] = _packed(group, own + copies)
    return groups


def sharing(layout: ModelLayout, group: Group) -> dict[int, int]:
    """The layers of a group that own no bytes, each with the layer whose rows it reads."""
    return {i: o for i, o in layout.owner.items() if i != o and layout.layer_group[i] == group.name}


def owners(group: Group) -> set[int]:
    """The layers that have bytes in a group's page."""
    return {layer_of(part) for part in group.spec.parts}


def layer_of(part: Part) -> int:
    """The layer that a part of a page belongs to."""
    return int(part.name.partition(".")[0])


def _packed(group: Group, parts: list[tuple[str, tuple[int, ...], str]]) -> Group:
    return dataclasses.replace(group, spec=pack(parts, group.spec.page_size))


def _split(group: Group, part: Part, ranks: int) -> tuple[int, ...]:
    """The shape of a part on one rank."""
    conv = len(part.shape) == 2  # [width, channels]; other states are [heads, ...], rows are [page_size, heads, dim]
    axis = 1 if group.kind != "state" or conv else 0
    size = part.shape[axis]
    if size % ranks and ranks % size:
        raise ConfigError(
            f"-tp {ranks} does not divide the {size} heads or channels of layer {layer_of(part)} in group {group.name}"
        )
    return tuple(max(1, n // ranks) if i == axis else n for i, n in enumerate(part.shape))
