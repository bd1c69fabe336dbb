"""Models by their shape alone, for planning and simulating without a download: text configs as Transformers reads them.

Every number is the checkpoint's own, from the file that `source` names; what a config leaves out has Transformers'
default for its `model_type`. `stored` is there where a checkpoint is smaller on disk than its parameters in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A model without its weights."""

    source: str  # where the numbers are from
    parameters: float  # of the text model, as published and rounded: a check that no number is wrong
    config: Mapping[str, Any]  # config.json
    stored: str = ""  # how the published weights differ from bfloat16, if they do

    def write(self, folder: Path) -> Path:
        """Make `folder` a model directory with nothing but its config.json, and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config), indent=1))
        return folder


def find(name: str) -> tuple[str, Preset] | None:
    """The preset of that name, in any case, and its name as it is written; None if there is none."""
    return next(((known, preset) for known, preset in PRESETS.items() if known.lower() == name.lower()), None)


def _marked(marks: str, **names: str) -> list[str]:
    """One entry a layer from one letter a layer: `_marked("ssf", s="sliding_attention", f="full_attention")`."""
    return [names[mark] for mark in marks]


def _attention(marks: str) -> list[str]:
    return _marked(marks, s="sliding_attention", f="full_attention", l="linear_attention", c="conv")


def _gemma3(rope_global: Mapping[str, Any], **numbers: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0, **rope_global},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        **numbers,
    }


def _gemma4(layer_types: Sequence[str], **numbers: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text",
        "layer_types": list(layer_types),
        "num_hidden_layers": len(layer_types),
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **numbers,
    }


def _qwen35(**numbers: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text",
        "layer_types": _attention("lllf" * 6),
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **numbers,
    }


_LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0}

PRESETS: Mapping[str, Preset] = {
    "gemma-3-270m": Preset(
        "config.json of google/gemma-3-270m-it",
        0.27e9,
        _gemma3(
            {"rope_type": "default"},
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            vocab_size=262_144,
            sliding_window=512,
            max_position_embeddings=32_768,
        ),
    ),
    "gemma-3-1b": Preset(
        "config.json of google/gemma-3-1b-it",
        1.0e9,
        _gemma3(
            {"rope_type": "default"},
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            vocab_size=262_144,
            sliding_window=512,
            max_position_embeddings=32_768,
        ),
    ),
    "gemma-3-4b": Preset(
        "text_config in config.json of google/gemma-3-4b-it",
        3.9e9,
        _gemma3(
            _LINEAR_ROPE,
            hidden_size=2560,
            intermediate_size=10_240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=262_208,
            sliding_window=1024,
            max_position_embeddings=131_072,
        ),
    ),
    "gemma-3-12b": Preset(
        "text_config in config.json of google/gemma-3-12b-it",
        11.8e9,
        _gemma3(
            _LINEAR_ROPE,
            hidden_size=3840,
            intermediate_size=15_360,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=262_208,
            sliding_window=1024,
            max_position_embeddings=131_072,
        ),
    ),
    "gemma-3-27b": Preset(
        "text_config in config.json of google/gemma-3-27b-it",
        27.0e9,
        _gemma3(
            _LINEAR_ROPE,
            hidden_size=5376,
            intermediate_size=21_504,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            query_pre_attn_scalar=168,
            vocab_size=262_208,
            sliding_window=1024,
            max_position_embeddings=131_072,
        ),
    ),
    "gemma-4-31b-it": Preset(
        "text_config in config.json of google/gemma-4-31b-it",
        30.7e9,
        _gemma4(
            _attention("sssssf" * 10),
            hidden_size=5376,
            intermediate_size=21_504,
            num_attention_heads=32,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            attention_k_eq_v=True,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            sliding_window=1024,
            max_position_embeddings=262_144,
        ),
    ),
    "gemma-4-E2B-it": Preset(
        "text_config in config.json of google/gemma-4-E2B-it",
        4.6e9,  # 2.3e9 and the embeddings of every layer
        _gemma4(
            _attention("ssssf" * 7),
            hidden_size=1536,
            intermediate_size=6144,
            num_attention_heads=8,
            num_key_value_heads=1,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=256,
            sliding_window=512,
            max_position_embeddings=131_072,
        ),
    ),
    "gpt-oss-20b": Preset(
        "config.json of openai/gpt-oss-20b",
        20.9e9,
        {
            "model_type": "gpt_oss",
            "layer_types": _attention("sf" * 12),
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201_088,
            "sliding_window": 128,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
        stored="the experts' weights are published in MXFP4, a quarter of what they take in bfloat16",
    ),
    "Qwen3.5-0.8B": Preset(
        "text_config in config.json of Qwen/Qwen3.5-0.8B", 0.75e9, _qwen35(hidden_size=1024, intermediate_size=3584)
    ),
    "Qwen3.5-wide": Preset(
        "no checkpoint: Qwen3.5-0.8B twice as wide, a size that is compared with other engines",
        1.9e9,
        _qwen35(hidden_size=2048, intermediate_size=6144),
    ),
    "Kimi-Linear-48B-A3B": Preset(
        "config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct",
        49.1e9,
        {
            "model_type": "kimi_linear",
            # The checkpoint says this by `linear_attn_config` (kda_layers, full_attn_layers, counted from 1).
            "layer_types": _attention("lllf" * 6 + "llf"),
            "mlp_layer_types": _marked("d" + "s" * 26, d="dense", s="sparse"),
            "num_hidden_layers": 27,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "vocab_size": 163_840,
            "model_max_length": 1_048_576,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    "Inkling-Small": Preset(
        "text_config in config.json of thinkingmachines/Inkling-Small",
        266e9,  # the checkpoint's index, 531.9 GB in bfloat16, which has a vision, an audio and a draft part too
        {
            "model_type": "inkling_text",
            "layer_types": _marked("sssssf" * 7, s="hybrid_sliding", f="hybrid"),
            "mlp_layer_types": _marked("d" * 2 + "s" * 40, d="dense", s="sparse"),
            "num_hidden_layers": 42,
            "hidden_size": 4096,
            "intermediate_size": 16_384,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "swa_num_attention_heads": 32,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 128,
            "sliding_window_size": 512,
            "conv_kernel_size": 4,
            "d_rel": 16,
            "rel_extent": 1024,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "log_scaling_n_floor": 128_000,
            "log_scaling_alpha": 0.1,
            "logits_mup_width_multiplier": 16.0,
            "vocab_size": 201_024,
            "unpadded_vocab_size": 200_058,
            "max_position_embeddings": 1_048_576,
            "dtype": "bfloat16",
        },
    ),
    "LFM2-1.2B": Preset(
        "config.json of LiquidAI/LFM2-1.2B",
        1.17e9,
        {
            "model_type": "lfm2",
            "layer_types": _attention("ccfccfccfcfcfcfc"),
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 12_288,  # 8,192 once `block_auto_adjust_ff_dim` has had its way
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "conv_bias": False,
            "vocab_size": 65_536,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    "Nemotron-H-8B": Preset(
        "config.json of nvidia/Nemotron-H-8B-Base-8K",
        8.1e9,
        {
            "model_type": "nemotron_h",
            "layers_block_type": _marked(
                "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                **{"M": "linear_attention", "*": "full_attention", "-": "mlp"},
            ),
            "hidden_size": 4096,
            "intermediate_size": 21_504,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
            "mamba_ssm_cache_dtype": "float32",
            "vocab_size": 131_072,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    "Granite-4-H-Tiny": Preset(
        "config.json of ibm-granite/granite-4.0-h-tiny",
        6.9e9,
        {
            "model_type": "granitemoehybrid",
            "layer_types": _attention("lllllf" + "lllllllllf" * 3 + "llll"),
            "num_hidden_layers": 40,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "position_embedding_type": "nope",
            "vocab_size": 100_352,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
}
"""By the name that the command line takes, in any case. A directory of that name is meant by a path with a slash."""
