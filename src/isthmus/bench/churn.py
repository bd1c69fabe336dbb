"""A tiny model shape whose ids outnumber its window pages ten to one: what made the founding bug show at once.

Ten window layers share a page that is ten times as large as the one full layer's, so an arena holds a tenth as many
window pages as full pages, and virtual ids, of which there are as many as full pages, pass the window group's own page
count as soon as a tenth of them have been used. Weights are random (`--load-format dummy`), wide enough that every
token depends on what the caches hold. A token is a character, so equal texts are equal tokens.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

NAME = "churn"
WINDOW_LAYERS = 10
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "pool_bytes": 96 << 20}
"""Settings of the engine unless others are given; 128 five-shot prompts fill this arena."""

_UNKNOWN, _END = "<unk>", "<eos>"
_HIDDEN = 64


def write(folder: Path) -> Path:
    """A directory with config.json and a tokenizer, as `isthmus serve DIRECTORY --load-format dummy` takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": _UNKNOWN, "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps(_config(tokenizer), indent=1))
    return folder


def _tokenizer() -> Tokenizer:
    """One token for each printable character, one for all others."""
    vocabulary = {symbol: i for i, symbol in enumerate([_UNKNOWN, _END, *string.printable[:95], "\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(_UNKNOWN, special=True), AddedToken(_END, special=True)])
    return tokenizer


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    size = tokenizer.get_vocab_size()
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": WINDOW_LAYERS + 1,
        "layer_types": ["sliding_attention"] * WINDOW_LAYERS + ["full_attention"],
        "sliding_window": 64,
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 8192,
        "initializer_range": 1.5 * _HIDDEN**-0.5,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(_END),
        "pad_token_id": tokenizer.token_to_id(_UNKNOWN),
    }
