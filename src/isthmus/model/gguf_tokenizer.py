"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` library alone.

Transformers reads it too, but what it builds has changed between releases that are all supported here (5.17 makes
another kind of tokenizer of Gemma 3, without BOS), and wrong ids are silent. The keys are documented at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a missing key means, and what a name under
`tokenizer.ggml.pre` stands for, is defined by llama.cpp's `src/llama-vocab.cpp`; the split patterns are those in the
`tokenizer.json` of the models that the names were given for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from isthmus.errors import ModelError
from isthmus.model.gguf import GGUFFile

_SPACE = "▁"
"""How SentencePiece writes a space."""

_NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

_GEMMA = ("gemma2", "gemma3")

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if the file has a chat template, chat_template.jinja.

    Raises:
        ModelError: as `build_tokenizer`.
    """
    build_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | _named_tokens(file, file.strings("tokenizer.ggml.tokens"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(str(template))


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, with BOS and EOS added to a text where the file says so.

    Raises:
        ModelError: a kind of tokenizer or a pre-tokenizer that is not known exactly, or metadata that is missing or
            makes no sense.
    """
    kind = file.require("tokenizer.ggml.model")
    if kind not in tuple(_KINDS):
        raise ModelError(
            f"{file.path}: a tokenizer of kind {kind!r} is not read from GGUF, only {' and '.join(sorted(_KINDS))}; "
            "use the model's safetensors directory or hub id"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    named = _named_tokens(file, tokens)
    tokenizer, adds_bos = _KINDS[kind](file, tokens, named)
    _add_whole_tokens(tokenizer, file, tokens, named)
    tokenizer.post_processor = _post_processor(file, named, adds_bos)
    return tokenizer


def _named_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    """The tokens with a role, for example {"bos_token": "<bos>"}."""
    named = {}
    for name, key in _NAMED_TOKENS.items():
        token_id = file.metadata.get(key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelError(f"{file.path}: {key} is {token_id!r}, which is none of its {len(tokens):,} tokens")
        named[name] = tokens[token_id]
    return named


def _sentencepiece(file: GGUFFile, tokens: Sequence[str], named: Mapping[str, str]) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: pieces with scores, and bytes for what no piece covers; adds BOS by default."""
    gemma = file.architecture in _GEMMA
    if gemma:  # runs of spaces are user-defined tokens, stored as real spaces; the model learned them as pieces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    ids = {token: index for index, token in enumerate(tokens)}
    if file.has_array("tokenizer.ggml.merges"):
        merges = _stored_merges(file, ids)
    elif gemma:  # its order of merging is the order of its pieces, since scores of user-defined ones are placeholders
        merges = derived_merges(ids, range(0, -len(tokens), -1))
    else:
        merges = derived_merges(ids, _per_token(file, "tokenizer.ggml.scores", tokens))
    unknown = named.get("unk_token")
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", not gemma):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        decoder.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer, True


def derived_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that make each token of two shorter ones, best score first: what SentencePiece does with scores.

    Args:
        ids: every token's id.
        scores: [ids], the higher the earlier. Between equals the longer left part goes first.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        score, length = -scores[index], len(token)
        for at in range(1, length):
            left = token[:at]
            if left in ids:
                right = token[at:]
                if right in ids:
                    found.append((score, -at, at - length, left, right))
    found.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for _, _, _, left, right in found]


@dataclass(frozen=True)
class _PreTokenizer:
    """What a name under `tokenizer.ggml.pre` stands for."""

    split: str | None = None  # the pattern that cuts a text into words; None: GPT-2's
    digits: bool = False  # each digit is cut off before that
    nfc: bool = False  # texts are composed (Unicode NFC) first
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    bos: bool = False  # what a file without add_bos_token means

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.split is not None:
            steps = [pre_tokenizers.Split(Regex(self.split), behavior="isolated")]
        elif self.digits:
            steps = [pre_tokenizers.Digits(individual_digits=True)]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None)
        return pre_tokenizers.Sequence([*steps, byte_level])


_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, whole_words=True, bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(split=_QWEN2_SPLIT, nfc=True),
    "smollm": _PreTokenizer(digits=True),
    "tekken": _PreTokenizer(split=_TEKKEN_SPLIT, whole_words=True, bos=True),
}


def _byte_level(file: GGUFFile, tokens: Sequence[str], named: Mapping[str, str]) -> tuple[Tokenizer, bool]:
    """GPT-2's byte-level BPE, with the merges in the file."""
    name = file.metadata.get("tokenizer.ggml.pre")
    pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise ModelError(
            f"{file.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not read from GGUF, only "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}; use the model's safetensors directory or hub id"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_stored_merges(file, ids), ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.bos


def _stored_merges(file: GGUFFile, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"{file.path}: the merge {merge!r} is not one of two tokens into a third; get the file again"
            )
        merges.append((left, right))
    return merges


def _per_token(file: GGUFFile, key: str, tokens: Sequence[str]) -> list[Any]:
    """Numbers in the metadata, one value for each token."""
    values = file.numbers(key)
    if len(values) != len(tokens):
        raise ModelError(
            f"{file.path}: {key} has {len(values):,} values for {len(tokens):,} tokens; get the file again"
        )
    return values


def _add_whole_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: Sequence[str], named: Mapping[str, str]) -> None:
    """Mark the tokens that are found whole in a text: special ones, which decoding may skip, and user-defined ones."""
    key = "tokenizer.ggml.token_type"
    types = _per_token(file, key, tokens) if file.has_array(key) else []
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == TokenType.CONTROL]
    special = list(dict.fromkeys([*special, *named.values()]))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    known = tokenizer.get_vocab()  # without the runs of spaces that were spelled otherwise
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind == TokenType.USER_DEFINED and token in known and token not in named.values()
        ]
    )


def _post_processor(file: GGUFFile, named: Mapping[str, str], adds_bos: bool) -> processors.PostProcessor:
    """What puts BOS before and EOS after a text, and after that a second text of a pair."""
    around = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = named.get(f"{name}_token")
        if token is not None and file.metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            token_id = file.metadata[_NAMED_TOKENS[f"{name}_token"]]
            around.append({"id": name, "ids": [token_id], "tokens": [token]})
    names = [str(token["id"]) for token in around]

    def part(text: str, segment: int) -> list[str]:
        pieces = [*(n for n in names if n == "bos"), text, *(n for n in names if n == "eos")]
        return [f"{piece}:{segment}" for piece in pieces]

    return processors.TemplateProcessing(
        single=part("$A", 0), pair=part("$A", 0) + part("$B", 1), special_tokens=around
    )


_Builder = Callable[[GGUFFile, Sequence[str], Mapping[str, str]], tuple[Tokenizer, bool]]
_KINDS: dict[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece}
