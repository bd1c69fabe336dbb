"""Mamba: what is kept is the last inputs of the convolution, and a vector per channel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.kernels.selective_scan import selective_scan
from isthmus.kernels.states import causal_conv
from isthmus.model.mixers.base import LayerStates, Mixer, StatePart, dtype_name


class Mamba(Mixer):
    """`out_proj(scan(x, *x_proj(x)) * silu(gate))` with `x, gate = in_proj(hidden)` and `x = act(conv(x))`."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        m = self.module
        channels, _, width = m.conv1d.weight.shape
        heads = getattr(m, "n_mamba_heads", 1)
        self.parts = (
            StatePart("conv", (width - 1, channels), dtype_name(m.conv1d.weight.dtype)),
            StatePart("ssm", (heads, channels // heads, m.ssm_state_size), dtype_name(torch.float32)),
        )

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        m = self.module
        x, gate = self._project(hidden)
        x = m.act(states.apply(causal_conv, "conv", x, m.conv1d.weight.squeeze(1), m.conv1d.bias))
        heads, channels, n = self.parts[1].shape
        x = x.unflatten(-1, (heads, channels))
        dt, b, c = self._select(x)
        rate = -m.A_log.float().exp().view(heads, channels, n)
        y = states.apply(selective_scan, "ssm", x, dt, b, c, rate, m.D.view(heads, channels))
        out: Tensor = m.out_proj(y.flatten(1) * functional.silu(gate))
        return out

    def _project(self, hidden: Tensor) -> Iterable[Tensor]:
        return self.module.in_proj(hidden).chunk(2, dim=-1)  # type: ignore[no-any-return]

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt `[T, 1, D]`, B and C `[T, 1, N]` of `[T, 1, D]`. Some families normalise all three."""
        m = self.module
        dt, b, c = m.x_proj(x).split([m.time_step_rank, m.ssm_state_size, m.ssm_state_size], dim=-1)
        if hasattr(m, "dt_layernorm"):
            dt, b, c = m.dt_layernorm(dt), m.b_layernorm(b), m.c_layernorm(c)
        return m.dt_proj(dt), b, c


class ZambaMamba(Mamba):
    """With heads that have a selection each, and the projection's two halves interleaved."""

    def _project(self, hidden: Tensor) -> Iterable[Tensor]:
        return self.module.in_proj(hidden).unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-any-return]

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.module
        selected = torch.einsum("thd,hsd->ths", x, m.x_proj_weight)
        dt, b, c = torch.split(selected, [m.time_step_rank, m.ssm_state_size, m.ssm_state_size], -1)
        return torch.einsum("thr,hdr->thd", dt, m.dt_proj_weight) + m.dt_proj_bias, b, c
