"""Finding and loading a model: what loads computes the same; what does not says what, where and what to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    FalconConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from isthmus.errors import IsthmusError, ModelError
from isthmus.model import source as source_module
from isthmus.model.source import ModelSource, build_model, resolve
from tests.model.tiny_gguf import tiny_model, write_gguf

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(4, 24)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a tiny llama in three shards, and a tokenizer."""
    path = tmp_path / "tiny-llama"
    tiny_model("llama").save_pretrained(path, max_shard_size="100KB")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(path)
    return path


def load(source: ModelSource, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    return build_model(source, dtype, attn_implementation="eager", progress=False, **options)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=IDS).logits
    return out


def refusal(call: Callable[[], object]) -> str:
    """The message of the ModelError a call ends in: one line."""
    with pytest.raises(ModelError) as error:
        call()
    assert isinstance(error.value, IsthmusError)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_loads_as_it_was_saved(folder: Path) -> None:
    source, original = resolve(str(folder)), tiny_model("llama")
    assert (source.name, source.converted) == ("tiny-llama", False)
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = load(source)
    assert torch.equal(logits(model), logits(original))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not any(parameter.requires_grad for parameter in model.parameters())
    stored = dict(source.iter_weights())
    assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in stored.items())
    assert source.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert source.load_tokenizer()("a")["input_ids"] == [0]
    assert source.end_token_ids() == (1,)


def test_dtype_and_attention_reach_the_model(folder: Path) -> None:
    model = build_model(resolve(str(folder)), torch.bfloat16, attn_implementation="sdpa", progress=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"


def test_a_gguf_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    original = tiny_model("qwen3")
    source = resolve(str(write_gguf(tmp_path / "small.gguf", "qwen3", original)), progress=False)
    assert (source.name, source.converted) == ("small", True)
    assert source.directory.is_relative_to(tmp_path / "cache")
    assert torch.equal(logits(load(source)), logits(original))


def multimodal(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gemma3":
        vision = VISION | {"image_size": 28, "patch_size": 14}
        return Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=4)
        ).eval()
    vision = VISION | {"model_type": "pixtral", "head_dim": 16}
    text = TEXT | {"model_type": "mistral"}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)).eval()


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_model_of_a_multimodal_checkpoint(kind: str, tmp_path: Path) -> None:
    whole = multimodal(kind)
    whole.save_pretrained(tmp_path)
    whole.set_attn_implementation("eager")
    source = resolve(str(tmp_path))
    assert source.load_config().model_type == {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind]
    assert torch.equal(logits(load(source)), logits(whole))


def test_dummy_weights_need_no_file_and_are_the_same_every_time(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    assert "no model.safetensors" in refusal(lambda: resolve(str(folder)))
    source = resolve(str(folder), load_format="dummy")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = load(source, load_format="dummy")
    assert torch.equal(torch.rand(3), expected)  # the caller's generator is left alone
    assert torch.equal(logits(first), logits(load(source, load_format="dummy")))
    assert first.model.layers[0].input_layernorm.weight.eq(1).all()


def test_a_family_with_a_table_of_attentions_of_its_own_is_refused(tmp_path: Path) -> None:
    FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50).save_pretrained(tmp_path)
    source = resolve(str(tmp_path), load_format="dummy")
    text = refusal(lambda: build_model(source, torch.float32, load_format="dummy"))
    assert text == "falcon cannot be served: its attention cannot be replaced"


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_numbers_that_do_not_go_together(load_format: str, folder: Path) -> None:
    """The constructors of modules find out, each in its own way."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "no such function"}))
    source = resolve(str(folder))
    assert str(folder) in refusal(lambda: build_model(source, torch.float32, load_format=load_format, progress=False))


def test_an_architecture_transformers_does_not_know(folder: Path) -> None:
    edit_config(folder, model_type="perceptron9000")
    message = refusal(lambda: resolve(str(folder)))
    assert "'perceptron9000'" in message
    assert "Transformers 5." in message
    assert "pip install -U transformers" in message


def test_a_model_that_is_not_a_text_generator(folder: Path) -> None:
    edit_config(folder, model_type="clip_vision_model")
    assert "not a model that generates text" in refusal(lambda: resolve(str(folder)))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama", "hidden_size": "many"}'])
def test_a_damaged_config(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(lambda: resolve(str(folder)))


def test_a_directory_without_config(tmp_path: Path) -> None:
    assert "no config.json" in refusal(lambda: resolve(str(tmp_path)))


@pytest.mark.parametrize("name", ["./missing", "/no/such/model.gguf", "model.gguf", "a/b/c", "~/nothing", "two words"])
def test_a_path_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    message = refusal(lambda: resolve(name))
    assert message.startswith(f"{name}: no such file")


def test_a_file_that_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    assert "not a .gguf file" in refusal(lambda: resolve(str(tmp_path / "model.bin")))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection.\nA long story")

    monkeypatch.setattr(source_module, "snapshot_download", unreachable)
    message = refusal(lambda: resolve("google/gemma-3-270m"))
    assert message.startswith("google/gemma-3-270m: ")
    assert "no connection" in message


def test_a_hub_model_keeps_its_id_and_dummy_fetches_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(source_module, "snapshot_download", download)
    assert resolve("org/tiny").name == "org/tiny"
    resolve("org/tiny", load_format="dummy")
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]


def test_a_missing_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(lambda: resolve(str(folder)))


def test_a_damaged_conversion_says_how_to_make_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    path = str(write_gguf(tmp_path / "small.gguf", "llama", tiny_model("llama")))
    source = resolve(path, progress=False)
    load(source, torch.bfloat16)
    for dtype, folder in ((torch.bfloat16, source.directory / "bf16"), (torch.float32, source.directory)):
        shard = folder / "model.safetensors"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-8])
        message = refusal(partial(load, source, dtype))
        assert message.endswith(f"; delete {folder} to convert it anew")
        shard.write_bytes(whole)
    load(source)


@pytest.mark.parametrize("keep", [0, 5, 9, 400, -1])
def test_a_shard_that_is_cut_off(keep: int, folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    assert shard.name in refusal(lambda: resolve(str(folder)))


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_shard_with_a_damaged_header(at: int, folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[at : at + 4] = b"\xff\xff\xff\xff"
    shard.write_bytes(data)
    assert shard.name in refusal(lambda: resolve(str(folder)))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"missing: model.norm.weight;"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(1)}), r"unknown: model.extra;"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"another shape: model.norm.weight;"),
    ],
)
def test_weights_that_do_not_match_the_config(
    change: Callable[[dict[str, torch.Tensor]], object], what: str, folder: Path
) -> None:
    change_weights(folder, change)
    source = resolve(str(folder))
    assert what in refusal(lambda: load(source))


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "tokenizer" in refusal(resolve(str(folder)).load_tokenizer)
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer" in refusal(resolve(str(folder)).load_tokenizer)


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    source = resolve(str(folder))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert source.end_token_ids() == (1, 106)
    (folder / "generation_config.json").unlink()
    assert source.end_token_ids() == (1,)
    edit_config(folder, eos_token_id=None)
    assert source.end_token_ids() == ()


def test_transformers_logging_is_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_logging._get_library_root_logger(), "level", logging.INFO)
    transformers_logging.enable_progress_bar()

    def state() -> tuple[int, bool]:
        return transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    before = state()
    assert before == (logging.INFO, True)
    change_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    refusal(lambda: load(resolve(str(folder))))
    assert state() == before


def test_config_is_a_config(folder: Path) -> None:
    assert isinstance(resolve(str(folder)).load_config(), PretrainedConfig)
