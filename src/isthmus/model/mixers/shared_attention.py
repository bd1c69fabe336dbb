"""Attention blocks that several layers share (Zamba): nothing is replaced but the number of the layer.

Every use is a module of its own with the same weights, built before it knows where, and told its layer when called.
The attention function asks the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isthmus.model.mixers.base import StandIn


class SharedAttention(StandIn):
    """The module itself, with its number."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        self.module.layer_idx = layer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return type(self.module).forward(self.module, hidden_states, *args, **kwargs)
