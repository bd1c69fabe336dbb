"""The attention function "isthmus" of Transformers' registry.

Importing this module registers it. A model built with `attn_implementation="isthmus"` then calls it in every
layer, and what it does there is the business of the `attention_batch` that the caller passes to the model's
forward: Transformers hands keyword arguments down to the attention function, so nothing global is needed. No mask
function is registered under the name, which makes Transformers build no mask at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from isthmus.kernels.reference import GroupBatch, LayerCache, Scoring, Scratch, attend
from isthmus.model.latent import LATENT, Latent

NAME = "isthmus"
"""The `attn_implementation` to build models with."""


class Attend(Protocol):
    """What a forward of the model does in its attention layers."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]: where each token stands in its sequence."""
        ...

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Scoring,
        window: int | None,
        others: Mapping[str, object],
    ) -> Tensor:
        """query `[1, heads, T, k_dim]`, key and value `[1, kv_heads, T, dim]` -> `[1, T, heads, v_dim]`.

        `others` are keyword arguments of the call that nobody here has a meaning for; and "chunked", where true: the
        window is a chunk, and a token sees what comes from the last multiple of it on.
        """
        ...


@dataclass(frozen=True)
class AttentionBatch:
    """One step, for all layers."""

    groups: Mapping[str, GroupBatch]
    layer_group: Mapping[int, str]  # of each layer
    owner: Mapping[int, int]  # the layer whose rows a layer reads
    caches: Mapping[int, LayerCache]  # of each owner
    scratch: Scratch
    positions: Tensor  # int64 [T]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Scoring,
        window: int | None,
        others: Mapping[str, object],
    ) -> Tensor:
        """See `Attend`. The window is the group's; the layout was derived from the same call."""
        layer = module.layer_idx
        assert isinstance(layer, int)
        owner = self.owner[layer]
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        batch = self.groups[self.layer_group[layer]]
        cache = self.caches[owner]
        return attend(query, key, value, cache, batch, how, self.scratch, write=owner == layer)[None]


def isthmus_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    relative: Tensor | None = None,
    attention_batch: Attend | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The registered function, with the signature Transformers calls. ValueError without `attention_batch`.

    relative: `[T, heads, distances]`, added to the score of the key so many tokens before the query; none farther.
    """
    if attention_batch is None:
        raise ValueError('attn_implementation="isthmus" needs attention_batch=... in the call of the model')
    if attention_mask is not None:  # nobody made one for us, so the module did: it says more than what comes later
        others["attention_mask"] = attention_mask
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = Scoring(scaling, softcap, s_aux, relative)
    latent: Latent | None = getattr(module, LATENT, None)
    if latent is None:
        return attention_batch.attend(module, query, key, value, how, sliding_window, others), None
    out = attention_batch.attend(module, latent.absorb(query), key, value, how, sliding_window, others)
    return latent.expand(out), None


AttentionInterface.register(NAME, isthmus_attention)
