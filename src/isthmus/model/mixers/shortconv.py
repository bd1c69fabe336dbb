"""Gated short convolutions (LFM2): what is kept is the last inputs of the convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isthmus.kernels.states import causal_conv
from isthmus.model.mixers.base import LayerStates, Mixer, StatePart, dtype_name


class ShortConv(Mixer):
    """`out_proj(C * conv(B * x))` with `B, C, x = in_proj(hidden)`."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        channels, _, width = self.module.conv.weight.shape
        self.parts = (StatePart("conv", (width - 1, channels), dtype_name(self.module.conv.weight.dtype)),)

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        m = self.module
        before, after, x = m.in_proj(hidden).chunk(3, dim=-1)
        x = states.apply(causal_conv, "conv", before * x, m.conv.weight.squeeze(1), m.conv.bias)
        out: Tensor = m.out_proj(after * x)
        return out
