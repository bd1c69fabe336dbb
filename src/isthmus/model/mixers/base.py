"""What everything that stands in for a module has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StatePart:
    """One array of a layer's state; its name is unique within the layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of `isthmus.memory.spec.ITEMSIZE`


class LayerStates(Protocol):
    """The states of one layer in a step."""

    def apply(self, operation: Callable[..., Tensor], *parts_and_inputs: Any, **settings: Any) -> Tensor:
        """`operation(step, *views and inputs, **settings)`: a `str` among the positional arguments names a part of the
        layer's state, and stands for its view; everything else is handed on."""
        ...


class Mix(Protocol):
    """What a forward of the model does in its mixers (as `isthmus.model.attention.Attend` in its attention)."""

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        ...


class StandIn(ABC):
    """Stands in for one module."""

    parts: tuple[StatePart, ...] = ()
    """What it keeps of a sequence in its state page."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        """`layer`: position among the decoder layers; `dtype`: of hidden states."""
        self.module: Any = module
        self.layer = layer
        self.dtype = dtype

    @abstractmethod
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the module's forward: takes what it takes, returns what it returns. `[1, T, width]`."""


class Mixer(StandIn):
    """Stands in for a module with a state. `batch` is set by whoever runs the model, before each forward."""

    batch: Mix | None = None

    @abstractmethod
    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """The module's mathematics over a flat batch: `[T, width]` -> `[T, width]`."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `StandIn`. The others of the arguments are masks and caches that nobody needs."""
        if self.batch is None:
            raise ValueError(f"{type(self.module).__name__} runs over state pages: set the mixer's batch first")
        return self.batch.mix(self, hidden_states)


def dtype_name(dtype: torch.dtype) -> str:
    """As in a `StatePart`."""
    return str(dtype).removeprefix("torch.")
