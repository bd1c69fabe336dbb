"""Kimi delta attention: a gated delta net with a decay for every channel of the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isthmus.kernels.kda import kimi_delta_rule
from isthmus.model.mixers.gdn import DeltaNet, Projected, Shape


class KimiDelta(DeltaNet):
    """The decay comes from a module of its own; the gate has a projection, or a narrow one after the other."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        m: Any = module
        super().__init__(module, layer, dtype, Shape(m.num_heads, m.num_heads, m.head_dim, m.head_dim), kimi_delta_rule)

    def project(self, hidden: Tensor) -> Projected:
        """See `DeltaNet`."""
        m = self.module
        qkv = torch.cat((m.q_proj(hidden), m.k_proj(hidden), m.v_proj(hidden)), -1)
        gate = m.g_proj(hidden) if hasattr(m, "g_proj") else m.g_b_proj(m.g_a_proj(hidden))
        return Projected(qkv, gate, m.forget_gate(hidden[None])[0], m.b_proj(hidden).sigmoid())
