"""Tiny GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MODEL_TYPES = {"gemma2": "gemma2", "gemma3": "gemma3_text", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
VOCABULARY = 288
WINDOW = 8
_PRE_TOKENIZERS = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}

_COMMON_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_model(architecture: str, **settings: Any) -> PreTrainedModel:
    """A random float32 model of one GGUF architecture; norms and biases random too, so that mixing them up shows."""
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
        "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
    }  # fmt: skip
    if architecture in ("gemma2", "gemma3"):
        values |= {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **(values | settings))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write_gguf(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    leave_out: str = "",
    metadata: dict[str, Any] | None = None,
    pre: str | None = None,
) -> Path:
    """Write a model as a GGUF file: matrices as `kind`, vectors as float32; `pre` None: the architecture's own."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    _add_tokenizer(writer, architecture, pre or _PRE_TOKENIZERS.get(architecture, "default"))
    for name, tensor in model.state_dict().items():
        stored = stored_name(name, architecture)
        if (stored == "output.weight" and config.tie_word_embeddings) or stored == leave_out:
            continue
        values = stored_values(name, tensor.numpy(), architecture, model)
        type_ = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(values, type_), raw_dtype=type_)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_name(name: str, architecture: str) -> str:
    """The GGUF name of a Transformers parameter."""
    module, suffix = name.rsplit(".", 1)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in top:
        return f"{top[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    norms = _GEMMA_NORMS if architecture in ("gemma2", "gemma3") else _PLAIN_NORMS
    return f"blk.{layer}.{(_COMMON_NAMES | norms)[part]}.{suffix}"


def stored_values(
    name: str, values: npt.NDArray[np.float32], architecture: str, model: PreTrainedModel
) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter writes for a parameter."""
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    if architecture == "llama" and (count := heads.get(name.split(".")[-2])):
        return values.reshape(count, 2, len(values) // count // 2, -1).swapaxes(1, 2).reshape(values.shape)
    return values


def byte_letters() -> list[str]:
    """The 256 letters in which byte-level tokenizers write bytes: printable ones first, then stand-ins."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write_vocabulary(path: Path, architecture: str, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file that holds a tokenizer and no tensors: `metadata` by the keys after `tokenizer.`."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.{key}", value)
        else:
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, architecture: str, pre: str) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    if architecture in ("gemma2", "gemma3"):
        pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "ab", "▁ab"]
        types = [TokenType.BYTE] * 256 + [TokenType.NORMAL] * 6
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * 4 + [0.0] * 256 + [-float(i) for i in range(VOCABULARY - 260)])
    else:
        pieces = [*byte_letters(), "ĠĠ", "ab", "Ġa"]
        types = [TokenType.NORMAL] * len(pieces)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(["Ġ Ġ", "a b", "Ġ a"])
    writer.add_tokenizer_pre(pre)
    unused = [f"<unused{i}>" for i in range(VOCABULARY - 4 - len(pieces))]
    writer.add_token_list(special + pieces + unused)
    writer.add_token_types([TokenType.CONTROL] * 4 + types + [TokenType.CONTROL] * len(unused))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(architecture in ("gemma2", "gemma3"))
    writer.add_chat_template("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}")
