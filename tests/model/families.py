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
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
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
PLAIN_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {**SIZE, **HEADS, **PLAIN_EXPERTS, "num_hidden_layers": 2, "pad_token_id": 0, "n_routed_experts": 4})
    for name in (
        *("apertus", "arcee", "ernie4_5", "ernie4_5_moe", "exaone", "gemma", "glm4", "granite", "granitemoe", "helium"),
        *("hunyuan_v1_dense", "internlm3", "minimax_m2", "mixtral", "nanochat", "olmo2", "olmoe", "phi", "phimoe"),
        *("qwen2", "qwen2_moe", "qwen3_moe", "seed_oss", "solar_open", "starcoder2"),
    )
}
POSITIONED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": (
        "llama4_text",
        {
            **SIZE,
            **HEADS,
            "num_hidden_layers": 4,
            "attention_chunk_size": 12,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "floor_scale": 16,
            "attn_scale": 0.7,
            "pad_token_id": 0,
        },
    ),
}
MLA = {
    **SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**MLA, **GROUPED_EXPERTS}),
    "deepseek_v2": ("deepseek_v2", {**MLA, **GROUPED_EXPERTS, "q_lora_rank": None}),
    "minicpm3": ("minicpm3", {**MLA, "hidden_size": 96, "pad_token_id": 0, "scale_depth": 4.0, "dim_model_base": 96}),
    "youtu": ("youtu", {**MLA, "pad_token_id": 0}),
    "glm4_moe_lite": ("glm4_moe_lite", {**MLA, **GROUPED_EXPERTS, "pad_token_id": 0}),
    "axk1": ("axk1", {**MLA, **GROUPED_EXPERTS, "pad_token_id": 0}),
}
INKLING = {
    "hidden_size": 64,
    "vocab_size": 200,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": WINDOW,
    "d_rel": 4,
    "rel_extent": 24,
    "log_scaling_n_floor": 8,
    "log_scaling_alpha": 0.7,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "logits_mup_width_multiplier": 1.0,
    "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
}
KIMI = {
    **MLA,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "inkling": ("inkling_text", INKLING),
    "lfm2_moe": (
        "lfm2_moe",
        {**SIZE, **HEADS, **EXPERTS, "layer_types": ["conv", F, "conv", "conv", F], "num_dense_layers": 1},
    ),
    "lfm2": ("lfm2", {**SIZE, **HEADS, "layer_types": ["conv", F, "conv", "conv", F], "conv_bias": True}),
    "qwen3_next": ("qwen3_next", {**SIZE, **HEADS, **LINEAR, **EXPERTS, "layer_types": [L, L, L, F]}),
    "qwen3_5": ("qwen3_5_text", {**SIZE, **HEADS, **LINEAR, "layer_types": [L, L, L, F]}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**SIZE, **HEADS, **LINEAR, **EXPERTS, "layer_types": [L, L, L, F]}),
    "olmo_hybrid": ("olmo_hybrid", {**SIZE, **HEADS, **LINEAR, "layer_types": [L, L, L, F], "pad_token_id": 0}),
    "lara_mini": (
        "lara_mini",
        {**SIZE, **HEADS, **LINEAR, **EXPERTS, "layer_types": [L, S, L, F, S], "sliding_window": WINDOW},
    ),
    "kimi_linear": (
        "kimi_linear",
        {**KIMI, "linear_head_dim": 12, "linear_num_heads": 3, "layer_types": [L, L, F], "pad_token_id": 0},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**KIMI, "head_dim": 12, "first_k_dense_replace": 1, "layer_types": [L, L, F], "pad_token_id": 0},
    ),
    "lfm3": (
        "lfm3",
        {
            **SIZE,
            **HEADS,
            "layer_types": ["conv", "conv", F, "conv", S],
            "sliding_window": WINDOW,
            "conv_bias": True,
            "pad_token_id": 0,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **SIZE,
            **HEADS,
            **MAMBA2,
            "layer_types": [L, L, F, L],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": ("bamba", {**SIZE, **HEADS, **MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "falcon_h1": (
        "falcon_h1",
        {
            **SIZE,
            **HEADS,
            **MAMBA2,
            "num_hidden_layers": 3,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
            "ssm_in_multiplier": 1.3,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "falcon_h1-no-norm": ("falcon_h1", {**SIZE, **HEADS, **MAMBA2, "num_hidden_layers": 3, "mamba_rms_norm": False}),
    "nemotron_h": (
        "nemotron_h",
        {
            **SIZE,
            **HEADS,
            "layers_block_type": [L, "moe", F, "mlp", L, F],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 20,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "time_step_min": 1e-20,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **SIZE,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 2,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 12,
            "time_step_min": 1e-20,
        },
    ),
    "jamba": (
        "jamba",
        {
            **SIZE,
            **HEADS,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 12,
            "mamba_dt_rank": 6,
        },
    ),
    "zamba": (
        "zamba",
        {
            **SIZE,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "n_mamba_heads": 2,
            "mamba_d_state": 12,
            "mamba_dt_rank": 6,
        },
    ),
    "minimax": (
        "minimax",
        {
            **SIZE,
            **HEADS,
            "layer_types": [L, F, L, F],
            "block_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mamba2": (
        "mamba2",
        {**SIZE, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2},
    ),
    "mamba": ("mamba", {**SIZE, "num_hidden_layers": 3, "state_size": 12}),
    "falcon_mamba": ("falcon_mamba", {**SIZE, "num_hidden_layers": 3, "state_size": 12}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **SIZE,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 5,
            "attention_window_size": WINDOW,
        },
    ),
}
FAMILIES = ATTENTION | PLAIN | POSITIONED | LATENT | RECURRENT
"""A row: model_type and the values of its config. PLAIN ones are attention that others show already; POSITIONED ones
have attention that counts positions itself, in Transformers; LATENT ones cache a latent row a token (MLA); RECURRENT
ones keep a state page a sequence."""


def config_of(name: str) -> tuple[str, dict[str, Any]]:
    """The row of a family, complete."""
    model_type, values = FAMILIES[name]
    if "layer_types" in values:
        values = {"num_hidden_layers": len(values["layer_types"]), **values}
    return model_type, values
