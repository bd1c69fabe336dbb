"""One step for all mixers of a model, over state pages in place (the CPU's, and the reference of any other)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isthmus.kernels.states import StateStep, state_view
from isthmus.memory import Group
from isthmus.model.mixers.base import Mixer

Views = Mapping[int, Mapping[str, Tensor]]
"""By layer and part: `[pages, *shape]` over the arena."""


def state_views(arena: Tensor, groups: Iterable[Group]) -> dict[int, dict[str, Tensor]]:
    """Views of every part of the state groups' pages over `arena` (uint8 [bytes])."""
    views: dict[int, dict[str, Tensor]] = {}
    for group in groups:
        if group.kind == "state":
            for part in group.spec.parts:
                layer, _, name = part.name.partition(".")
                views.setdefault(int(layer), {})[name] = state_view(arena, group, part.name)
    return views


@dataclass(frozen=True)
class StateBatch:
    """Implements `isthmus.model.mixers.base.Mix`."""

    step: StateStep
    views: Views

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """See `Mix`."""
        return mixer.mix(hidden[0], _Layer(self.step, self.views[mixer.layer]))[None]


@dataclass(frozen=True)
class _Layer:
    step: StateStep
    views: Mapping[str, Tensor]

    def apply(self, operation: Callable[..., Tensor], *parts_and_inputs: Any, **settings: Any) -> Tensor:
        """See `isthmus.model.mixers.base.LayerStates`."""
        given = (self.views[x] if isinstance(x, str) else x for x in parts_and_inputs)
        return operation(self.step, *given, **settings)
