"""A tiny hybrid model, and an engine over it that must be idle after every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import Gemma3TextConfig, PreTrainedTokenizerFast

from isthmus.llm import LLM
from tests.engine.toy_tokenizers import byte_level, token_id
from tests.llm.small import build
from tests.server.tiny_model import write_drawn


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sliding layers of window 8 and a full one; a byte-level tokenizer that puts `<eos>` before a text."""
    path = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer.from_str(byte_level().to_str())
    raw.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", token_id(raw, "<eos>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.save_pretrained(path)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    write_drawn(path, config)
    return path


@pytest.fixture(scope="package")
def shared_llm(folder: Path) -> LLM:
    return build(folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert not shared_llm.engine.has_work
    assert shared_llm.usage().live == 0
