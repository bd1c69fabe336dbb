"""Lightning attention (MiniMax): what is kept is a matrix per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isthmus.kernels.lightning import lightning_attention
from isthmus.model.mixers.base import LayerStates, Mixer, StatePart, dtype_name


class Lightning(Mixer):
    """`out_proj(sigmoid(output_gate(hidden)) * norm(lightning(q, k, v)))` with `q, k, v = act(qkv_proj(hidden))`.

    The state is fp32, though Transformers keeps it in the model's dtype: heads that hardly fade sum up thousands of
    tokens, and a bf16 sum takes in nothing below its last bit.
    """

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        m = self.module
        self.parts = (StatePart("kv", (m.num_attention_heads, m.head_dim, m.head_dim), dtype_name(torch.float32)),)

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        m = self.module
        qkv = m.act_fn(m.qkv_proj(hidden)).unflatten(-1, (m.num_attention_heads, -1))
        query, key, value = qkv.split(m.head_dim, dim=-1)
        y = states.apply(lightning_attention, "kv", query, key, value, m.slope_rate.flatten())
        out: Tensor = m.out_proj(torch.sigmoid(m.output_gate(hidden)) * m.norm(y.flatten(1)))
        return out

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """See `Mixer`; the second is nobody's attention weights."""
        return super().forward(hidden_states), None
