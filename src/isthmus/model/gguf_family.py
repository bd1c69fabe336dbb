"""What each GGUF architecture means in Transformers: the config its metadata states, and how its weights are stored.

Transformers has a reader of its own, but it parses the vocabulary value by value (ten seconds for Gemma 3) and drops
rope scaling, soft caps and window patterns. Everything a file states about the model is set here, since a config
class's default is one checkpoint's value. Sources: llama.cpp's `convert_hf_to_gguf.py`, which wrote the files, and
its per-architecture graphs, which say what a missing key means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.errors import ModelError
from isthmus.model.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor llama.cpp writes for `llama3` rope scaling: one divisor per rotary frequency."""


@dataclass(frozen=True)
class GGUFFamily:
    """How one GGUF architecture maps to a Transformers model."""

    model_type: str  # of the Transformers config
    model_class: str  # written as the config's `architectures`
    config: Callable[[GGUFFile], dict[str, Any]]  # the family's own config keys, over the common ones
    norm_offset: bool = False  # norm weights are stored as 1 + w
    interleaved_rotary: bool = False  # rows of q and k are stored in rotary pairs (0, 1), not halves (0, d/2)


def family_of(file: GGUFFile) -> GGUFFamily:
    """The family of a file's architecture.

    Raises:
        ModelError: an architecture that is not read, listing those that are.
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {file.architecture!r} is not read, only {', '.join(sorted(FAMILIES))}; "
            "use the model's safetensors directory or hub id"
        )
    if file.metadata.get(f"{file.architecture}.expert_count", 0):
        raise ModelError(
            f"{file.path}: GGUF files of mixture-of-experts models are not read; "
            "use the model's safetensors directory or hub id"
        )
    return family


def config_values(file: GGUFFile) -> dict[str, Any]:
    """The keyword arguments of the Transformers config that a GGUF file describes.

    Raises:
        ModelError: an unknown architecture, a missing key, or a setting that cannot be represented.
    """
    family = family_of(file)
    heads = _uniform(file, "attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: has no token_embd.weight, so it is not a whole model; use an unsplit GGUF file")
    hidden, layers = int(_get(file, "embedding_length")), int(_get(file, "block_count"))
    if layers > len(file.tensors):
        raise ModelError(f"{file.path}: has {len(file.tensors)} tensors for {layers} layers; use an unsplit GGUF file")
    values = {
        "architectures": [family.model_class],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _uniform(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(file, "attention.head_count_kv", heads),
        "head_dim": _head_dim(file, hidden // heads),
        "rms_norm_eps": _float32(_get(file, "attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(_get(file, "context_length")),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return values | family.config(file)


def end_token_ids(file: GGUFFile) -> list[int]:
    """The ids that end a text: end of sequence, and end of turn where the file names one."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(int(file.metadata[key]) for key in keys if key in file.metadata))


def _get(file: GGUFFile, suffix: str, default: Any = None) -> Any:
    key = f"{file.architecture}.{suffix}"
    return file.require(key) if default is None else file.metadata.get(key, default)


def _uniform(file: GGUFFile, suffix: str, default: Any = None) -> int:
    """A value that may be stated per layer, and must then be the same in all."""
    value = _get(file, suffix, default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ModelError(
            f"{file.path}: {suffix} differs between layers ({sorted(values)}), which is not read from GGUF"
        )
    return int(values.pop())


def _head_dim(file: GGUFFile, otherwise: int) -> int:
    key = int(_get(file, "attention.key_length", _get(file, "rope.dimension_count", otherwise)))
    value = int(_get(file, "attention.value_length", key))
    if key != value:
        raise ModelError(f"{file.path}: key heads of {key} and value heads of {value} are not read from GGUF")
    return key


def _float32(value: float) -> float:
    """The shortest decimal that is this float32: 1e-06 rather than 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile) -> dict[str, Any]:
    """The rope of the (full) attention layers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _float32(_get(file, "rope.freq_base", 10_000.0))}
    if ROPE_FACTORS in file.tensors:
        return rope | _llama3_scaling(file, rope["rope_theta"])
    kind = _get(file, "rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not read from GGUF, only linear, yarn and llama3")
    rope |= {"rope_type": kind, "factor": _float32(_get(file, "rope.scaling.factor"))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = int(_get(file, "rope.scaling.original_context_length"))
    return rope


def _llama3_scaling(file: GGUFFile, theta: float) -> dict[str, Any]:
    """The `llama3` parameters behind the stored divisors: 1 for short waves, `factor` for long ones, a ramp between.

    Only `factor` can be read off; the other three are those of every published Llama 3 and are checked.
    """
    stored = file.tensors[ROPE_FACTORS].values()
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    dim = 2 * stored.size
    waves = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    ramp = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    if not np.allclose(stored, 1.0 / ((1.0 - ramp) / factor + ramp), rtol=1e-4):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} is not the rope scaling of Llama 3, the only one read from GGUF")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(file: GGUFFile) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _qwen3(file: GGUFFile) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _nothing(file: GGUFFile) -> dict[str, Any]:
    return {}


def _query_scalar(file: GGUFFile, layers_of_27b: int) -> int:
    """Gemma scales queries by the head size, but the 27B models by hidden size over heads."""
    if int(_get(file, "block_count")) == layers_of_27b:
        return int(_get(file, "embedding_length")) // _uniform(file, "attention.head_count")
    return _head_dim(file, 256)


def _gemma2(file: GGUFFile) -> dict[str, Any]:
    layers = int(_get(file, "block_count"))
    return {
        "sliding_window": int(_get(file, "attention.sliding_window", 4096)),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "query_pre_attn_scalar": _query_scalar(file, layers_of_27b=46),
        "attn_logit_softcapping": _float32(_get(file, "attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": _float32(_get(file, "final_logit_softcapping", 30.0)),
    }


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    layers = int(_get(file, "block_count"))
    pattern = _get(file, "attention.sliding_window_pattern", 6)
    if not isinstance(pattern, list):
        pattern = [(i + 1) % int(pattern) != 0 for i in range(layers)]
    local = {"rope_type": "default", "rope_theta": _float32(_get(file, "rope.freq_base_swa", 10_000.0))}
    return {
        "sliding_window": int(_get(file, "attention.sliding_window")),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "query_pre_attn_scalar": _query_scalar(file, layers_of_27b=62),
        "rope_parameters": {"full_attention": _rope(file), "sliding_attention": local},
        "final_logit_softcapping": file.metadata.get("gemma3.final_logit_softcapping"),
    }


FAMILIES: dict[str, GGUFFamily] = {
    "gemma2": GGUFFamily("gemma2", "Gemma2ForCausalLM", _gemma2, norm_offset=True),
    "gemma3": GGUFFamily("gemma3_text", "Gemma3ForCausalLM", _gemma3, norm_offset=True),
    # llama.cpp writes Mistral as "llama" too: the same mathematics, head_dim stated, without its sliding window.
    "llama": GGUFFamily("llama", "LlamaForCausalLM", _llama, interleaved_rotary=True),
    "qwen2": GGUFFamily("qwen2", "Qwen2ForCausalLM", _nothing),
    "qwen3": GGUFFamily("qwen3", "Qwen3ForCausalLM", _qwen3),
}
