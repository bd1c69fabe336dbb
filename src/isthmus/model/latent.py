"""Multi-head latent attention (MLA) over compressed rows: what is cached of a token is one latent row for all heads.

A module of Transformers computes the latent `c [rank]` and a shared rotated key `k_pe [rope]` of a token, expands them
to keys and values of every head (`expand_kv`), and calls the attention function. Here `expand_kv` leaves the row as it
is, and the projections that it would have applied move to the other side of the products (DeepSeek-V2, arXiv
2405.04434, section 2.1.2):

    q . (W_k c) = (W_k' q) . c          absorb: queries grow to the row's size
    sum_i w_i (W_v c_i) = W_v (sum_i w_i c_i)      expand: what comes out shrinks to a head's

so attention has one key head, whose values are the first `rank` elements of its keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LATENT = "isthmus_latent"
"""Attribute of an attention module whose rows are latent."""


class Latent:
    """Stands in for `expand_kv` of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self.rank: int = module.kv_lora_rank  # type: ignore[assignment]

    def rows(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """`[1, 1, T, rank]` and `[1, 1, T, rope]` -> keys `[1, 1, T, rank + rope]`, and the values at their start."""
        key = torch.cat((latent, k_pe), -1)
        return key, key[..., : self.rank]

    def absorb(self, query: Tensor) -> Tensor:
        """`[1, heads, T, nope + rope]` -> `[1, heads, T, rank + rope]`."""
        nope = self._module.qk_nope_head_dim
        keys, _ = self._weights()
        return torch.cat((query[..., :nope] @ keys, query[..., nope:]), -1)

    def expand(self, out: Tensor) -> Tensor:
        """`[1, T, heads, rank]` -> `[1, T, heads, v_head_dim]`."""
        _, values = self._weights()
        return (out.transpose(1, 2) @ values.transpose(1, 2)).transpose(1, 2)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Of keys `[heads, nope, rank]` and of values `[heads, v_head_dim, rank]`; views of the module's."""
        module = self._module
        both = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, self.rank)
        keys, values = both.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        return keys, values


def compress(modules: Iterable[nn.Module]) -> None:
    """Let those of these modules that expand latent rows keep them as they are; once is enough."""
    for module in modules:
        if hasattr(module, "expand_kv") and not hasattr(module, LATENT):
            latent = Latent(module)
            setattr(module, LATENT, latent)
            module.__dict__["expand_kv"] = latent.rows  # before the method of its class
