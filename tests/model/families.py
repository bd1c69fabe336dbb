"""Tiny models of every family that is served: a row is `name: (model_type, values of its config)`."""

from __future__ import annotations

from typing import Any

WINDOW = 16
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
S, F, L = "sliding_attention", "full_attention", "linear_attention"
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
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
    "granite_swa": ("granite_swa", {**SIZE, **HEADS, "layer_types": [F, S, S, S], "sliding_window": WINDOW}),
    "ministral": ("ministral", {**SIZE, **HEADS, "layer_types": [S, F, S, F], "sliding_window": WINDOW}),
    "ministral3": ("ministral3", {**SIZE, **HEADS, "num_hidden_layers": 2}),
    "phi3": ("phi3", {**SIZE, **HEADS, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0}),
    "smollm3": ("smollm3", {**SIZE, **HEADS, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "exaone4": ("exaone4", {**SIZE, **HEADS, "layer_types": [S, F, S, F, S, F], "sliding_window": WINDOW}),
    "gemma3n": (
        "gemma3n_text",
        {
            **SIZE,
            **HEADS,
            "layer_types": [S, F, S, F, S, F],
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 200,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_num_inputs": 2,
        },
    ),
    "afmoe": (
        "afmoe",
        {
            **SIZE,
            **HEADS,
            "layer_types": [S, S, S, F],
            "sliding_window": WINDOW,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {**SIZE, **HEADS, "layer_types": [F, S, S, F], "sliding_window": WINDOW, "moe_intermediate_size": 32},
    ),
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {**SIZE, **HEADS, "layer_types": ["conv", F, "conv", "conv", F], "conv_bias": True}),
    "qwen3_next": ("qwen3_next", {**SIZE, **HEADS, **LINEAR, **EXPERTS, "layer_types": [L, L, L, F]}),
    "qwen3_5": ("qwen3_5_text", {**SIZE, **HEADS, **LINEAR, "layer_types": [L, L, L, F]}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**SIZE, **HEADS, **LINEAR, **EXPERTS, "layer_types": [L, L, L, F]}),
    "olmo_hybrid": ("olmo_hybrid", {**SIZE, **HEADS, **LINEAR, "layer_types": [L, L, L, F], "pad_token_id": 0}),
    "lara_mini": (
        "lara_mini",
        {**SIZE, **HEADS, **LINEAR, **EXPERTS, "layer_types": [L, S, L, F, S], "sliding_window": WINDOW},
    ),
}
FAMILIES = ATTENTION | RECURRENT
"""A row: model_type and the values of its config. Those of RECURRENT keep a state page a sequence."""


def config_of(name: str) -> tuple[str, dict[str, Any]]:
    """The row of a family, complete."""
    model_type, values = FAMILIES[name]
    if "layer_types" in values:
        values = {"num_hidden_layers": len(values["layer_types"]), **values}
    return model_type, values
