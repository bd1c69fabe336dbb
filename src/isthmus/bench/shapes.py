"""Models by their shape alone: named configs with random weights, so that a bench needs no download.

A shape stands for MODEL in every bench that builds or serves one, and implies `--load-format dummy`. It is a directory
as Transformers reads it, there for as long as the bench runs. A directory of the same name is meant by a path with a
slash, `./gemma-3-1b`.

The tokenizer has a text for every id, decoded by the same steps as Gemma's, so that detokenising costs what it costs
with a real one. A text is tokenised character by character.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from isthmus.flags import engine_args

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # Gemma's ids 0 to 3


@dataclass(frozen=True)
class Shape:
    """A model without its weights."""

    source: str  # where the numbers are from
    config: Mapping[str, Any]  # config.json

    def write(self, folder: Path) -> Path:
        """Make `folder` a model directory without weights, and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config), indent=1))
        _tokenizer(self.config["vocab_size"]).save(str(folder / "tokenizer.json"))
        names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
        named = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        return folder


def _gemma3(rope_global: Mapping[str, Any], **numbers: Any) -> dict[str, Any]:
    """What all sizes of Gemma 3 share: head size, five windows to one full layer, rotary bases, tied embeddings."""
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
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


SHAPES: Mapping[str, Shape] = {
    "gemma-3-1b": Shape(
        "config.json of google/gemma-3-1b-it",
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
    "gemma-3-4b": Shape(
        "text_config in config.json of google/gemma-3-4b-it",
        _gemma3(
            {"rope_type": "linear", "factor": 8.0},
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
}


@contextlib.contextmanager
def as_model(args: argparse.Namespace) -> Iterator[None]:
    """If the MODEL that flags and YAML name is a shape, let `args` name a directory of it meanwhile.

    For parsers with `add_engine_flags`.
    """
    if args.config is None and not hasattr(args, "model"):
        yield  # whoever reads the settings says what is missing
        return
    settings = engine_args(args)
    shape = SHAPES.get(settings["model"])
    if shape is None:
        yield
        return
    with TemporaryDirectory(prefix="isthmus-shape-") as folder:
        args.model = str(shape.write(Path(folder) / settings["model"]))
        args.load_format = settings.get("load_format", "dummy")
        yield


def _tokenizer(vocab_size: int) -> Tokenizer:
    symbols = [*_SPECIAL, *string.printable[:95], "\n"]
    words = (f"▁{token:x}" for token in range(len(symbols), vocab_size))
    vocabulary = {text: token for token, text in enumerate((*symbols, *words)) if token < vocab_size}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    return tokenizer
