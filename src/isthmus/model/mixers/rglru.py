"""The recurrent block of RecurrentGemma: it keeps the last inputs of the convolution, and a number per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.kernels.rglru import rglru
from isthmus.kernels.states import causal_conv
from isthmus.model.mixers.base import LayerStates, Mixer, StatePart, dtype_name

SHARPNESS = 8.0
"""The logarithm of a decay is at most so many times `softplus(recurrent_param)`: Griffin's constant c."""


class RecurrentBlock(Mixer):
    """`linear_out(rglru(conv(linear_x(hidden))) * act(linear_y(hidden)))`, with gates in blocks of channels."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        channels, _, width = self.module.conv_1d.weight.shape
        self.parts = (
            StatePart("conv", (width - 1, channels), dtype_name(self.module.conv_1d.weight.dtype)),
            StatePart("lru", (channels,), dtype_name(torch.float32)),
        )

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        m, unit = self.module, self.module.rg_lru
        x = states.apply(causal_conv, "conv", m.linear_x(hidden), m.conv_1d.weight.squeeze(1), m.conv_1d.bias)
        enter = _gate(x, unit.input_gate_weight, unit.input_gate_bias)
        fade = _gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        decay = -SHARPNESS * fade * functional.softplus(unit.recurrent_param)
        x = states.apply(rglru, "lru", x * enter, decay)
        out: Tensor = m.linear_out(x * m.act_fn(m.linear_y(hidden)))
        return out

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """See `Mixer`; the second is nobody's attention weights."""
        return super().forward(hidden_states), None


def _gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[T, C]` through blocks of weights `[blocks, C / blocks, C / blocks]`."""
    blocks = torch.unflatten(x, -1, bias.shape).transpose(0, 1)
    return torch.baddbmm(bias[:, None], blocks, weight).transpose(0, 1).flatten(1).sigmoid()
