"""A model directory that loads in a blink: random weights, two sliding layers of window 8 and a full one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PretrainedConfig, PreTrainedTokenizerFast

from tests.engine.toy_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}{{ eos_token }}{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}"
)


def write_tiny_model(path: Path, *, template: str | None = TEMPLATE) -> Path:
    """Byte-level tokens, so every text can be spelled and most tokens are parts of characters."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None, final_logit_softcapping=20.0,
    )  # fmt: skip
    write_drawn(path, config)
    return path


def write_drawn(path: Path, config: PretrainedConfig) -> None:
    """A model of that shape, with weights that keep its hidden states as large as they come."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    model.tie_weights()
    model.save_pretrained(path)
