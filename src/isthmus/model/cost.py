"""What a forward of a model reads and computes, counted from its modules: for estimates of its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from isthmus.model.layout import ModelLayout


@dataclass(frozen=True)
class ForwardCost:
    """Of one model, all ranks together. A multiplication and its addition are two operations."""

    layers: int
    dense_bytes: int  # of weights that every forward reads, the head's among them; of embeddings only rows are taken
    expert_bytes: int  # of all experts
    experts: int  # 1 without experts
    experts_per_token: int
    token_flops: float  # of a token through the layers
    sample_flops: float  # of the head, for one token
    pair_flops: dict[str, float]  # per group of attention layers, all of them together: of one query and one key
    hidden_size: int

    def weight_bytes(self, tokens: int) -> float:
        """That a step of so many tokens reads, if the router sends them everywhere alike."""
        touched = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self.dense_bytes + self.expert_bytes * touched


def count(model: PreTrainedModel, layout: ModelLayout) -> ForwardCost:
    """Count a model on any device. Where experts are, a token meets `num_experts_per_tok` of them."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    named = ((module, type(module).__name__) for module in model.modules())
    experts = [module for module, name in named if name.endswith("Experts") and not name.endswith("SharedExperts")]
    of_experts = {parameter for module in experts for parameter in module.parameters()}
    of_tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    dense = set(model.parameters()) - of_experts - of_tables - ({head.weight} if head is not None else set())
    number = next((int(n) for n in _settings(config, "num_local_experts", "num_experts", "n_routed_experts")), 1)
    chosen = next((int(n) for n in _settings(config, "num_experts_per_tok", "top_k_experts", "moe_topk")), 1)
    routed = sum(parameter.numel() for parameter in of_experts) * (chosen / number if experts else 0)
    return ForwardCost(
        config.num_hidden_layers,
        sum(parameter.nbytes for parameter in dense) + (head.weight.nbytes if head is not None else 0),
        sum(parameter.nbytes for parameter in of_experts),
        number if experts else 1,
        chosen if experts else 1,
        2.0 * (sum(parameter.numel() for parameter in dense) + routed),
        2.0 * head.weight.numel() if head is not None else 0.0,
        _pair_flops(layout),
        config.hidden_size,
    )


def _pair_flops(layout: ModelLayout) -> dict[str, float]:
    """Of the scores and of the weighted sum, for every query head."""
    parts = {part.name: part.shape[-1] for group in layout.groups for part in group.spec.parts}
    flops = {group.name: 0.0 for group in layout.groups if group.kind != "state"}
    for layer, group in layout.layer_group.items():
        owner = layout.owner[layer]
        key = parts[f"{owner}.k"]
        flops[group] += 2.0 * layout.heads[layer] * (key + parts.get(f"{owner}.v", key))
    return flops


def _settings(config: object, *names: str) -> Iterator[int]:
    """Of these settings, those that the config has."""
    return (value for name in names if (value := getattr(config, name, None)) is not None)
