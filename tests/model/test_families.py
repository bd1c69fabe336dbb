"""Every family, tiny and random, gives Transformers' own greedy tokens out of a poisoned arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.model.harness import Harness, paged, reference, tiny

WINDOW = 16
NEW = 24
# Tied embeddings would make a random model repeat its last token.
SIZE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {**SIZE, **HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 11}
S, F = "sliding_attention", "full_attention"

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": [S, S, F, S, S, F]}),
    "gemma2": (
        "gemma2",
        {**GEMMA, "layer_types": [S, F, S, F], "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma4-e2b": (
        "gemma4_text",
        {
            **SIZE,
            **HEADS,
            "num_key_value_heads": 1,
            "layer_types": [S, F, S, F, S, F],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 200,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-31b": (
        "gemma4_text",
        {
            **SIZE,
            **HEADS,
            "layer_types": [S, S, F, S, S, F],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **SIZE,
            **HEADS,
            "layer_types": [S, F, S, F],
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3": ("qwen3", {**SIZE, **HEADS, "num_hidden_layers": 4}),
    "llama": ("llama", {**SIZE, **HEADS, "num_hidden_layers": 4}),
    "mistral": ("mistral", {**SIZE, **HEADS, "num_hidden_layers": 4, "sliding_window": WINDOW}),
    "olmo3": ("olmo3", {**SIZE, **HEADS, "layer_types": [S, S, S, F], "sliding_window": WINDOW}),
    "cohere2": ("cohere2", {**SIZE, **HEADS, "layer_types": [S, S, S, F], "sliding_window": WINDOW}),
}


@dataclass(frozen=True)
class Case:
    """A family, ready to run, and what Transformers says."""

    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    model_type, values = FAMILIES[request.param]
    if "layer_types" in values:
        values = {"num_hidden_layers": len(values["layer_types"]), **values}
    model = tiny(model_type, **values)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (n,), generator=draw).tolist() for n in (61, 1, 23, 40)]
    expected = [reference(model, prompt, NEW) for prompt in prompts]
    assert all(len(set(tokens)) >= 8 for tokens in expected), "degenerate tokens prove nothing"
    return Case(paged(model), prompts, expected)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (4, 100), (16, 13)])
def test_greedy_tokens_are_transformers(case: Case, page_size: int, chunk: int) -> None:
    """61 tokens of prompt and 24 more are five windows; sequences of unlike length share every step."""
    assert Harness(case.model, page_size).generate(case.prompts, NEW, chunk) == case.expected


def test_tokens_survive_moving_pages(case: Case) -> None:
    """Closing every hole before every step moves pages of both groups under running sequences."""
    harness = Harness(case.model, 4, compact=True)
    assert harness.generate(case.prompts, NEW, 11) == case.expected
    if len(harness.layout.groups) > 1:
        assert sum(harness.pool.moved_pages.values()) > 0
