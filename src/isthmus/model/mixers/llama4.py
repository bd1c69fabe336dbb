"""Llama 4's attention: some layers see only their chunk of the sequence, the others scale queries by position.

Both depend on where a token stands, which the module works out from the length of its cache; a flat batch of several
sequences has positions of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from isthmus.model.attention import Attend, isthmus_attention
from isthmus.model.mixers.base import StandIn


class Llama4Attention(StandIn):
    """No state of its own: it caches keys and values as any attention does."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        super().__init__(module, layer, dtype)
        self.chunked: bool = self.module.config.layer_types[layer] == "chunked_attention"

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Tensor | None = None,
        attention_batch: Attend | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """In place of the module's forward, with its signature."""
        m = self.module
        assert attention_batch is not None
        shape = (*hidden_states.shape[:-1], -1, m.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (m.q_proj, m.k_proj, m.v_proj))
        if m.use_rope:
            assert position_embeddings is not None
            query, key = apply_rotary_emb(query, key, position_embeddings.to(query.device))
        if hasattr(m, "qk_norm"):
            query, key = m.qk_norm(query), m.qk_norm(key)
        if m.attn_temperature_tuning and not m.use_rope:
            age = torch.floor((attention_batch.positions.float() + 1.0) / m.floor_scale)
            query = (query * (torch.log1p(age) * m.attn_scale + 1.0).view(1, -1, 1, 1)).to(query.dtype)
        out, _ = isthmus_attention(
            m,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            scaling=m.scaling,
            sliding_window=m.config.attention_chunk_size if self.chunked else None,
            chunked=self.chunked,
            attention_batch=attention_batch,
        )
        return m.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None
