"""Checkpoints whose weights are quantized load as the plain ones that they stand for, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.errors import ModelError
from isthmus.model.source import build_model, resolve
from tests.model.families import config_of
from tests.model.harness import tiny

BLOCK = 128  # of fp8
SCALED = 32  # of mxfp4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Stored = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Stored, Tensor]]
"""What is stored of a weight, by the ends of its names, and what it stands for."""


def fp8(weight: Tensor) -> tuple[Stored, Tensor]:
    """e4m3 with a scale for each 128 x 128."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = torch.unflatten(torch.unflatten(padded, 0, (-1, BLOCK)), 2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = (stored.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    whole = stored.flatten(2).flatten(0, 1)[:rows, :columns]
    return {"": whole.contiguous(), "_scale_inv": scale.contiguous()}, meant


def whole_fp8(weight: Tensor) -> tuple[Stored, Tensor]:
    """e4m3 with one scale."""
    scale = weight.float().abs().amax() / 448
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"": stored, "_scale_inv": scale}, stored.float() * scale


def mxfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    """Two numbers a byte with a power of two for each 32 inputs of an output."""
    lines = torch.unflatten(weight.float().transpose(1, 2), 2, (-1, SCALED))
    exponent = lines.abs().amax(-1).clamp(min=1e-20).log2().floor() - 2
    code = (lines / exponent[..., None].exp2()).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    meant = (E2M1[code] * exponent[..., None].exp2()).flatten(2).transpose(1, 2)
    packed = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
    return {"_blocks": packed.contiguous(), "_scales": (exponent + 127).to(torch.uint8)}, meant


def write(
    folder: Path,
    model: PreTrainedModel,
    quantize: Quantize,
    names: set[str],
    settings: dict[str, Any] | None,
    outer: str = "",
    inside: bool = False,
) -> Stored:
    """A checkpoint of `model` with these weights quantized; the state it stands for.

    outer: a model type whose text model this is.
    inside: the settings stand in the config of the text model.
    """
    stored: Stored = {}
    meant = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in model.state_dict().items():
        if name in names:
            parts, whole = quantize(value)
            stored |= {name + end: part for end, part in parts.items()}
            meant[name] = whole.to(value.dtype)
        else:
            stored[name] = value.contiguous()
    config = model.config.to_dict() | {"dtype": "bfloat16", "quantization_config": settings}
    if outer:
        settings = config.pop("quantization_config") | {"modules_to_not_convert": ["lm_head", "model.visual"]}
        config = {"model_type": outer, "text_config": config, "dtype": "bfloat16"}
        (config["text_config"] if inside else config)["quantization_config"] = settings
        stored = {name.replace("model.", "model.language_model.", 1): value for name, value in stored.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return meant


def small(family: str, **more: int) -> PreTrainedModel:
    model_type, values = config_of(family)
    return tiny(model_type, **(values | more)).to(torch.bfloat16)


def linears(model: PreTrainedModel) -> set[str]:
    named = model.named_modules()
    return {f"{name}.weight" for name, m in named if isinstance(m, nn.Linear) and "lm_head" not in name}


def assert_loads(folder: Path, meant: Stored) -> None:
    config = resolve(str(folder)).load_config()
    assert config.quantization_config["dequantize"] is True, (
        "where there is a GPU, modules of another kind are made else"
    )
    found = build_model(resolve(str(folder)), torch.bfloat16, attn_implementation="eager", progress=False).state_dict()
    assert found.keys() == meant.keys()
    for name, value in meant.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("outer", "inside"), [("", False), ("qwen3_5", False), ("qwen3_5", True)])
def test_fp8(tmp_path: Path, outer: str, inside: bool) -> None:
    """Also where an outer config says so of a model with a tower for images, or that of its text."""
    model = small("qwen3_5" if outer else "qwen3", hidden_size=2 * BLOCK, intermediate_size=BLOCK)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    assert_loads(tmp_path / "m", write(tmp_path / "m", model, fp8, linears(model), settings, outer, inside))


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_fp8_with_one_scale_a_weight(tmp_path: Path, scheme: str) -> None:
    model = small("qwen3", hidden_size=2 * BLOCK, intermediate_size=BLOCK)
    settings = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": None}
    assert_loads(tmp_path / "m", write(tmp_path / "m", model, whole_fp8, linears(model), settings))


def test_a_config_that_says_null_is_a_plain_one(tmp_path: Path) -> None:
    meant = write(tmp_path / "m", small("qwen3"), fp8, set(), None)
    source = resolve(str(tmp_path / "m"))
    found = build_model(source, torch.bfloat16, attn_implementation="eager", progress=False).state_dict()
    assert all(torch.equal(found[name], value) for name, value in meant.items())


def test_fp8_whose_last_block_is_smaller_is_refused(tmp_path: Path) -> None:
    """Transformers takes 224 numbers in two blocks for twice 112, where 128 and 96 are meant."""
    model = small("qwen3", hidden_size=2 * BLOCK - 32, intermediate_size=BLOCK)
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    write(tmp_path / "m", model, fp8, linears(model), settings)
    with pytest.raises(ModelError, match="has 224 numbers in 2 blocks of fp8"):
        build_model(resolve(str(tmp_path / "m")), torch.bfloat16, attn_implementation="eager", progress=False)


def test_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published."""
    model = small("gpt_oss", hidden_size=2 * SCALED, intermediate_size=2 * SCALED)
    names = {name for name in model.state_dict() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(names) == 2 * model.config.num_hidden_layers
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert_loads(tmp_path / "m", write(tmp_path / "m", model, mxfp4, names, settings))


@pytest.mark.parametrize("outer", ["", "qwen3_5"])
@pytest.mark.parametrize("settings", [{"quant_method": "awq", "bits": 4}, {"quant_method": "new"}, {"bits": 4}])
def test_others_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], outer: str) -> None:
    write(tmp_path / "m", small(outer or "qwen3"), fp8, set(), settings, outer, inside=True)
    with pytest.raises(ModelError) as caught:
        resolve(str(tmp_path / "m"))
    message = str(caught.value)
    assert "\n" not in message
    assert repr(settings.get("quant_method")) in message
    assert "mxfp4 and fp8" in message
