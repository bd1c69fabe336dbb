"""How finely the attention of a layer group is cut, and the room that parts of it take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from isthmus.engine.device_plan import Grain, most_items
from isthmus.kernels.attention import head_tiles, prefill_programs, prefill_rows, prefill_tile
from isthmus.kernels.plan import most_parts
from isthmus.model.layout import ModelLayout

_PROGRAMS_PER_CORE = 2  # of a decode


class Shape(NamedTuple):
    """Attention of a layer."""

    kv_heads: int
    group: int  # query heads per key head
    k_dim: int
    v_dim: int


def attention_shapes(layout: ModelLayout, name: str, ranks: Mapping[int, int]) -> set[Shape]:
    """Of the layers of a group; `ranks` are the sizes of values that are the first elements of keys."""
    spec = next(group.spec for group in layout.groups if group.name == name)
    found = set()
    for layer in (layer for layer, group in layout.layer_group.items() if group == name):
        _, kv_heads, k_dim = spec.part(f"{layout.owner[layer]}.k").shape
        v_dim = ranks.get(layer) or spec.part(f"{layout.owner[layer]}.v").shape[2]
        found.add(Shape(kv_heads, layout.heads[layer] // kv_heads, k_dim, v_dim))
    return found


def grain_of(shapes: Collection[Shape], cores: int, width: int) -> Grain:
    """For so many multiprocessors, and activations of `width` bytes; by the largest of each number."""
    shape = Shape(*(max(numbers) for numbers in zip(*shapes, strict=True)))
    tile = prefill_tile(shape.group, shape.k_dim, shape.v_dim, width)
    programs = _PROGRAMS_PER_CORE * cores // (shape.kv_heads * head_tiles(shape.group, shape.v_dim))
    return Grain(tile, max(1, programs), prefill_programs(cores, *shape, width))


def parts_of(shapes: Collection[Shape], grain: Grain, lanes: int, width: int) -> Iterator[tuple[int, int]]:
    """(rows, value dims) of all parts of a launch, at most: of so many decodes, then of tiles; for each shape."""
    for shape in shapes:
        yield most_items(lanes, grain.programs) * shape.kv_heads * shape.group, shape.v_dim
        yield prefill_rows(most_parts(grain.tile_programs), grain.tile, *shape, width), shape.v_dim
