"""Inkling: short convolutions everywhere, and attention whose scores depend on the distance to the key.

The module computes a bias for every pair of a query and a key of one sequence. Here the bias of a token is a row over
distances, and the kernel picks from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isthmus.kernels.states import causal_conv
from isthmus.model.attention import Attend, isthmus_attention
from isthmus.model.mixers.base import LayerStates, Mixer, StandIn, StatePart, dtype_name


class InklingConv(Mixer):
    """`x + conv(x)` in float32; four of them in a layer."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        channels, _, width = self.module.conv1d.weight.shape
        self.part = f"conv{self.module.conv_idx}"
        self.parts = (StatePart(self.part, (width - 1, channels), dtype_name(dtype)),)

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        x, weight = hidden.float(), self.module.conv1d.weight.squeeze(1).float()
        return (states.apply(causal_conv, self.part, x, weight, self.module.conv1d.bias) + x).to(hidden.dtype)


class InklingAttention(StandIn):
    """No state of its own, beside that of the convolutions of its keys and values."""

    def forward(
        self, hidden_states: Tensor, *args: Any, attention_batch: Attend | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """In place of the module's forward, with its signature."""
        m = self.module
        assert attention_batch is not None
        shape = (*hidden_states.shape[:-1], -1, m.head_dim)
        query = m.q_norm(m.q_proj(hidden_states).view(shape))
        key = m.k_norm(m.k_sconv(m.k_proj(hidden_states)).view(shape))
        value = m.v_sconv(m.v_proj(hidden_states)).view(shape)
        relative = m.r_proj(hidden_states)[0].view(hidden_states.shape[1], m.num_heads, -1) @ m.rel_logits_proj.proj
        if not m.is_sliding and m.config.log_scaling_n_floor is not None:
            seen = (attention_batch.positions + 1).float() / m.config.log_scaling_n_floor
            tau = (1.0 + m.config.log_scaling_alpha * torch.log(seen.clamp(min=1.0)))[:, None, None]
            query = (query.float() * tau).to(query.dtype)
            relative = (relative.float() * tau).to(relative.dtype)
        out, _ = isthmus_attention(
            m,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            scaling=m.scaling,
            sliding_window=m.sliding_window,
            relative=relative,
            attention_batch=attention_batch,
        )
        return m.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None
