"""Mamba-2: what is kept is the last inputs of the convolution, and a matrix per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.kernels.ssd import ssd
from isthmus.kernels.states import causal_conv
from isthmus.model.mixers.base import LayerStates, Mixer, StatePart, dtype_name


class Mamba2(Mixer):
    """`out_proj(norm(ssd(act(conv(x, B, C)), dt), gate))` with `gate, (x, B, C), dt = in_proj(hidden)`.

    Step sizes are clamped to the module's `time_step_limit` for every token. (Transformers' own step of a single token
    does without, so that there a limit depends on how the tokens came.)
    """

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        m = self.module
        channels, _, width = m.conv1d.weight.shape
        self.parts = (
            StatePart("conv", (width - 1, channels), dtype_name(m.conv1d.weight.dtype)),
            StatePart("ssm", (m.num_heads, m.head_dim, m.ssm_state_size), dtype_name(torch.float32)),
        )

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        m = self.module
        keys = m.n_groups * m.ssm_state_size
        inner = m.num_heads * m.head_dim
        gate, mixed, dt = torch.split(self._project(hidden), [inner, inner + 2 * keys, m.num_heads], -1)
        mixed = m.act(states.apply(causal_conv, "conv", mixed, m.conv1d.weight.squeeze(1), m.conv1d.bias))
        x, b, c = torch.split(mixed, [inner, keys, keys], -1)
        y = states.apply(
            ssd,
            "ssm",
            c.view(-1, m.n_groups, m.ssm_state_size),
            b.view(-1, m.n_groups, m.ssm_state_size),
            x.view(-1, m.num_heads, m.head_dim),
            dt,
            m.dt_bias,
            -m.A_log.float().exp(),
            m.D,
            limit=tuple(m.time_step_limit),
        )
        out: Tensor = m.out_proj(self._gated(y.flatten(1), gate).to(hidden.dtype))
        return out

    def _project(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.module.in_proj(hidden)
        return projected

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        gated: Tensor = self.module.norm(y, gate)
        return gated


class FalconH1Mamba2(Mamba2):
    """With multipliers before and after the projection, and maybe without the norm."""

    def _project(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.module.in_proj(hidden * self.module.ssm_in_multiplier) * self.module.mup_vector[0]
        return projected

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return super()._gated(y, gate) if self.module.mamba_rms_norm else y * functional.silu(gate)
