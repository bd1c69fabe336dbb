"""Models by their shape alone: presets with random weights, so that a bench needs no download.

A preset stands for MODEL in every bench that builds or serves one, and implies `--load-format dummy`. It is a directory
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
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from isthmus import presets
from isthmus.flags import engine_args
from isthmus.presets import Preset

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # Gemma's ids 0 to 3


def write(preset: Preset, folder: Path) -> Path:
    """Make `folder` a model directory without weights, and return it."""
    preset.write(folder)
    _tokenizer(preset.config["vocab_size"]).save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@contextlib.contextmanager
def as_model(args: argparse.Namespace) -> Iterator[None]:
    """If the MODEL that flags and YAML name is a preset, let `args` name a directory of it meanwhile.

    For parsers with `add_engine_flags`.
    """
    if args.config is None and not hasattr(args, "model"):
        yield  # whoever reads the settings says what is missing
        return
    settings = engine_args(args)
    found = presets.find(settings["model"])
    if found is None:
        yield
        return
    name, preset = found
    with TemporaryDirectory(prefix="isthmus-shape-") as folder:
        args.model = str(write(preset, Path(folder) / name))
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
