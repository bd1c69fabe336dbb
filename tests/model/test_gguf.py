"""GGUF files: converted exactly, once, whole or not at all; damaged ones refused in one line."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from transformers import PreTrainedModel

from isthmus.errors import ModelError
from isthmus.model import convert
from isthmus.model.convert import build_folder, cache_root, convert_gguf, rounded_folder
from isthmus.model.gguf import GGUFFile
from isthmus.model.gguf_family import config_values
from isthmus.model.source import ModelSource, build_model
from tests.model.tiny_gguf import MODEL_TYPES, WINDOW, tiny_model, write_gguf

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))


def converted(path: Path) -> ModelSource:
    return ModelSource("tiny", convert_gguf(path, progress=False), converted=True)


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of three windows of tokens, so that layer kinds and both ropes matter."""
    ids = torch.arange(3 * WINDOW).remainder(50)[None] + 4
    with torch.no_grad():
        out: torch.Tensor = model(ids).logits
    return out


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("architecture", "tied"), [(name, True) for name in sorted(MODEL_TYPES)] + [("llama", False), ("qwen3", False)]
)
def test_a_converted_model_computes_what_the_original_does(architecture: str, tied: bool, tmp_path: Path) -> None:
    original = tiny_model(architecture, tie_word_embeddings=tied)
    source = converted(write_gguf(tmp_path / "m.gguf", architecture, original))
    loaded = build_model(source, torch.float32, attn_implementation="eager", progress=False)
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    if architecture.startswith("gemma"):  # 1 + w costs the last bits of small norm weights
        torch.testing.assert_close(logits(loaded), logits(original), atol=2e-4, rtol=1e-4)
    else:
        assert torch.equal(logits(loaded), logits(original))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_weights_are_the_values_the_file_stands_for(architecture: str, kind: str, tmp_path: Path) -> None:
    original, type_ = tiny_model(architecture), GGMLQuantizationType[kind]
    stored = dict(converted(write_gguf(tmp_path / "m.gguf", architecture, original, type_)).iter_weights())
    assert set(stored) == set(original.state_dict()) - {"lm_head.weight"}
    for name, weight in original.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        if values.ndim == 2:
            values = dequantize(quantize(values, type_), type_).reshape(values.shape)
        elif architecture == "gemma3":
            values = (values + np.float32(1)) - np.float32(1)
        assert np.array_equal(stored[name].float().numpy(), values), name


def test_half_types_are_stored_as_they_are(tmp_path: Path) -> None:
    source = converted(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), GGMLQuantizationType.BF16))
    assert {tensor.dtype for _, tensor in source.iter_weights() if tensor.dim() == 2} == {torch.bfloat16}


def test_large_tensors_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), GGMLQuantizationType.Q8_0)
    whole = dict(converted(path).iter_weights())
    shutil.rmtree(cache_root())
    monkeypatch.setattr("isthmus.model.gguf._CHUNK_BYTES", 5 * 32 * 4)
    for name, tensor in converted(path).iter_weights():
        assert torch.equal(tensor, whole[name]), name


def test_gemma3_config(tmp_path: Path) -> None:
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = converted(write_gguf(tmp_path / "m.gguf", "gemma3", tiny_model("gemma3"), metadata=scaling)).load_config()
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5]
    assert config.sliding_window == WINDOW
    assert config.query_pre_attn_scalar == config.head_dim == 16
    full, local = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    assert full == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
    assert local == {"rope_type": "default", "rope_theta": 10_000.0}


def llama3_divisors() -> npt.NDArray[np.float32]:
    config = tiny_model("llama", rope_parameters=LLAMA3).model.rotary_emb
    plain = 1.0 / (500000.0 ** (torch.arange(0, 16, 2) / 16))
    divisors: npt.NDArray[np.float32] = (plain / config.inv_freq).numpy().astype(np.float32)
    return divisors


def test_llama3_rope_scaling_is_recovered_and_only_that(tmp_path: Path) -> None:
    model, divisors = tiny_model("llama", rope_parameters=LLAMA3), llama3_divisors()
    path = write_gguf(tmp_path / "m.gguf", "llama", model, extra_tensors={"rope_freqs.weight": divisors})
    assert converted(path).load_config().rope_parameters == LLAMA3
    other = write_gguf(tmp_path / "o.gguf", "llama", model, extra_tensors={"rope_freqs.weight": divisors**2})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight") as error:
        convert_gguf(other)
    one_line(error)


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    gemma = converted(write_gguf(tmp_path / "g.gguf", "gemma3", tiny_model("gemma3"))).load_tokenizer()
    assert gemma("ab a").tokens() == ["<bos>", "ab", "▁a"]
    assert gemma.decode(gemma("ab a é")["input_ids"], skip_special_tokens=True) == "ab a é"
    source = converted(write_gguf(tmp_path / "l.gguf", "llama", tiny_model("llama"), pre="smollm"))
    smollm = source.load_tokenizer()
    assert smollm("a  5").tokens() == ["a", "ĠĠ", "5"]  # digits are split off first: both spaces stay together
    assert smollm.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    assert smollm.eos_token_id == 1
    assert source.end_token_ids() == (1,)


def test_a_second_conversion_does_nothing_and_a_changed_file_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    first = convert_gguf(path)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_model", lambda *_, **__: pytest.fail("converted again"))
        assert convert_gguf(path) == first
    retrained = tiny_model("llama")
    retrained.model.embed_tokens.weight.data *= 2
    write_gguf(path, "llama", retrained)  # the same header and size
    assert convert_gguf(path) != first


def test_the_same_file_is_the_same_model_wherever_and_whenever_it_was_installed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    first = convert_gguf(path)
    (tmp_path / "another environment").mkdir()
    copy = shutil.copyfile(path, tmp_path / "another environment" / "m.gguf")
    os.utime(copy, (0, 0))
    assert convert_gguf(copy) == first
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # one bit of one weight
    copy.write_bytes(data)
    assert convert_gguf(copy) != first


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_tokenizer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert_gguf(path)
    assert not [entry for entry in cache_root().iterdir() if entry.is_dir()]
    (killed := cache_root() / f"{next(cache_root().iterdir()).stem}.partial").mkdir()
    (killed / "config.json").write_text("{}")
    assert (convert_gguf(path) / "tokenizer.json").is_file()
    assert not killed.exists()


def test_two_at_once_convert_once(tmp_path: Path) -> None:
    inside, go, writes = threading.Event(), threading.Event(), []

    def write(partial: Path) -> None:
        writes.append(partial)
        inside.set()
        assert go.wait(10)
        (partial / "done").write_text("yes")

    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(build_folder(tmp_path / "cache" / "m", write))) for _ in "ab"
    ]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(writes) == 1
    assert folders == [tmp_path / "cache" / "m"] * 2
    assert (folders[1] / "done").read_text() == "yes"


def test_the_rounded_copy_is_what_rounding_gives(tmp_path: Path) -> None:
    source = converted(write_gguf(tmp_path / "m.gguf", "gemma3", tiny_model("gemma3")))
    exact = dict(source.iter_weights())
    folder = rounded_folder(source.directory, torch.bfloat16, progress=False)
    assert folder != source.directory
    for name, tensor in ModelSource("rounded", folder).iter_weights():
        assert torch.equal(tensor, exact[name].bfloat16()), name
    assert rounded_folder(source.directory, torch.float32) == source.directory
    loaded = build_model(source, torch.bfloat16, attn_implementation="eager", progress=False)
    assert torch.equal(loaded.model.embed_tokens.weight, exact["model.embed_tokens.weight"].bfloat16())


def test_a_file_that_is_cut_off_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 23, 24, 40, *range(100, len(whole), len(whole) // 60), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf") as error:
            convert_gguf(cut)
        one_line(error)
    assert not cache_root().exists() or not [entry for entry in cache_root().iterdir() if entry.is_dir()]


def test_damaged_headers_never_end_in_another_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3", tiny_model("gemma3"))
    whole, random, refused = path.read_bytes(), np.random.default_rng(0), []
    header = whole.index(b"tokenizer.ggml.model")
    for _ in range(400):
        data = bytearray(whole)
        data[int(random.integers(header))] = int(random.integers(256))
        path.write_bytes(data)
        try:
            config_values(GGUFFile(path))
        except ModelError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not [message for message in refused if "\n" in message]


def test_a_tensor_without_dimensions_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    data, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
    data[data.index(name) + len(name)] = 0
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.* 0 dimensions"):
        convert_gguf(path)


@pytest.mark.parametrize(
    "value", [{"attention.head_count": 0.0}, {"rope.freq_base": "fast"}, {"attention.layer_norm_rms_epsilon": "x"}]
)
def test_settings_that_make_no_sense_are_refused(value: dict[str, Any], tmp_path: Path) -> None:
    metadata = {f"llama.{key}": setting for key, setting in value.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), metadata=metadata)
    with pytest.raises(ModelError, match="its metadata does not describe a llama") as error:
        convert_gguf(path)
    one_line(error)


def test_what_is_not_read_says_so(tmp_path: Path) -> None:
    model = tiny_model("llama")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(other)
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' is not read, only gemma2, gemma3, llama, qwen2, qwen3") as error:
        convert_gguf(path)
    one_line(error)
    write_gguf(path, "llama", model, metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ModelError, match="longrope"):
        convert_gguf(path)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    extra = {"blk.0.mystery.weight": np.zeros(32, np.float32)}
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_model("llama"), leave_out="blk.3.ffn_up.weight", extra_tensors=extra
    )
    with pytest.raises(
        ModelError, match=r"1 missing \(model\.layers\.3\.mlp\.up_proj\.weight\), 1 unknown \(blk"
    ) as error:
        convert_gguf(path)
    one_line(error)


def test_a_cache_that_cannot_be_written_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="ISTHMUS_CACHE") as error:
        convert_gguf(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama")))
    one_line(error)
