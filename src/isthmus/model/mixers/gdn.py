"""Gated delta nets: a short convolution over queries, keys and values, then the gated delta rule.

The modules differ in how their projections are cut, and in what they call them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.states import causal_conv
from isthmus.model.mixers.base import LayerStates, Mixer, StatePart, dtype_name


class Projected(NamedTuple):
    """What the projections of a module make of `[T, width]`."""

    qkv: Tensor  # [T, 2 * key heads * K + heads * V], before the convolution
    gate: Tensor  # [T, heads * V], of the outputs
    decay: Tensor  # logarithms, as the rule takes them
    beta: Tensor  # [T, heads]


@dataclass(frozen=True)
class Shape:
    """Of a state and its keys."""

    key_heads: int
    heads: int
    k_dim: int
    v_dim: int


class DeltaNet(Mixer):
    """`output(norm(rule(conv(q, k, v), decay, beta), gate))`; the state is a matrix `[K, V]` per head."""

    def __init__(
        self, module: nn.Module, layer: int, dtype: torch.dtype, shape: Shape, rule: Callable[..., Tensor]
    ) -> None:
        """`rule`: with the signature of `gated_delta_rule`."""
        super().__init__(module, layer, dtype)
        self.shape, self.rule = shape, rule
        m = self.module
        self.norm: nn.Module = m.norm if hasattr(m, "norm") else m.o_norm
        self.output: nn.Linear = m.out_proj if hasattr(m, "out_proj") else m.o_proj
        channels, _, width = m.conv1d.weight.shape
        self.parts = (
            StatePart("conv", (width - 1, channels), dtype_name(self.output.weight.dtype)),
            StatePart("recurrent", (shape.heads, shape.k_dim, shape.v_dim), "float32"),
        )

    @abstractmethod
    def project(self, hidden: Tensor) -> Projected:
        """`[T, width]` through the module's projections."""

    def mix(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """See `Mixer`."""
        qkv, gate, decay, beta = self.project(hidden)
        query, key, value = self._heads(self._convolve(qkv, states))
        out = states.apply(self.rule, "recurrent", query, key, value, decay, beta)
        normed: Tensor = self.norm(out, torch.unflatten(gate, -1, (-1, self.shape.v_dim)))
        mixed: Tensor = self.output(normed.flatten(1))
        return mixed

    def _convolve(self, x: Tensor, states: LayerStates) -> Tensor:
        """In the dtype of the convolution's weights, which may be wider than that of the model."""
        conv: Any = self.module.conv1d
        wide = states.apply(causal_conv, "conv", x.to(conv.weight.dtype), conv.weight.squeeze(1), conv.bias)
        activated: Tensor = ACT2FN[self.module.activation](wide)
        return activated.to(x.dtype)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        keys = shape.key_heads * shape.k_dim
        query, key, value = torch.split(qkv, [keys, keys, shape.heads * shape.v_dim], -1)
        return (
            torch.unflatten(query, -1, (-1, shape.k_dim)),
            torch.unflatten(key, -1, (-1, shape.k_dim)),
            torch.unflatten(value, -1, (-1, shape.v_dim)),
        )


class GatedDeltaNet(DeltaNet):
    """One decay per head."""

    def __init__(self, module: nn.Module, layer: int, dtype: torch.dtype) -> None:
        m: Any = module
        shape = Shape(m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim)
        super().__init__(module, layer, dtype, shape, gated_delta_rule)

    def decay(self, step: Tensor) -> Tensor:
        """`[T, heads]`, from the projection of that shape."""
        m = self.module
        decay: Tensor = -m.A_log.float().exp() * F.softplus(step.float() + m.dt_bias)
        return decay


class Qwen3NextGatedDelta(GatedDeltaNet):
    """Two projections, with the columns of all that belongs to a key head side by side."""

    def project(self, hidden: Tensor) -> Projected:
        """See `DeltaNet`."""
        m = self.module
        parts = m.fix_query_key_value_ordering(m.in_proj_qkvz(hidden)[None], m.in_proj_ba(hidden)[None])
        query, key, value, gate, beta, step = (part[0].flatten(1) for part in parts)
        return Projected(torch.cat((query, key, value), -1), gate, self.decay(step), beta.sigmoid())


class Qwen35GatedDelta(GatedDeltaNet):
    """One projection for queries, keys and values, and one for each gate."""

    def project(self, hidden: Tensor) -> Projected:
        """See `DeltaNet`."""
        m = self.module
        decay = self.decay(m.in_proj_a(hidden))
        return Projected(m.in_proj_qkv(hidden), m.in_proj_z(hidden), decay, m.in_proj_b(hidden).sigmoid())


class OlmoGatedDelta(GatedDeltaNet):
    """A projection for everything; `beta` may reach 2, which turns what a state has for a key around."""

    def project(self, hidden: Tensor) -> Projected:
        """See `DeltaNet`."""
        m = self.module
        qkv = torch.cat((m.q_proj(hidden), m.k_proj(hidden), m.v_proj(hidden)), -1)
        beta = m.b_proj(hidden).sigmoid()
        decay = self.decay(m.a_proj(hidden))
        return Projected(qkv, m.g_proj(hidden), decay, beta * 2 if m.allow_neg_eigval else beta)
