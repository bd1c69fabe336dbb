"""Small tokenizers of the kinds that models have, built here so that no test downloads one."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CORPUS = (
    "the cat sat on the mat. Der Bär läuft über die Brücke! 한국어 텍스트는 조각납니다. مرحبا بالعالم "
    "日本語も🙂👩‍👩‍👧‍👦 emoji ✊🏽 \n\tdef f(x): return x  +  1"
)


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2's scheme: 256 byte tokens and a few merges, so most non-ASCII characters span tokens."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "¤"), ("c", "a"), ("ca", "t"), ("ð", "Ł"), ("Ġ", "Ġ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Byte fallback and spaces as U+2581, as Llama and Gemma have."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", "▁▁", "t", "h", "e", "▁t", "he", "▁the", "▁cat", "ca", "c", "a", ".", "ä", "한", "🙂", "\n"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("c", "a")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


@functools.cache
def llama() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


@functools.cache
def gemma() -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@functools.cache
def metaspace() -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    found = tokenizer.token_to_id(token)
    assert isinstance(found, int), token
    return found
