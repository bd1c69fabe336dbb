"""Every sort of experts that Transformers has: what `isthmus.model.experts` computes is what the module does itself.

Through Triton's interpreter without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.kernels import expert_rows
from isthmus.kernels import experts as kernels
from isthmus.model import experts
from tests.model.families import config_of
from tests.model.harness import tiny

SORTS = {
    "gpt_oss": "transposed, with biases, gate and up in turn",
    "qwen3_5_moe": "gate, then up",
    "nemotron_h": "no gate",
    "deepseek_v3": "as many experts as a router picks groups of",
    "jamba": "in some layers",
}


def modules(family: str) -> list[Any]:
    model_type, values = config_of(family)
    model = tiny(model_type, **values)
    experts.use(model, early=True)
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize("family", SORTS)
def test_as_the_module_itself(
    device: str, family: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(expert_rows, "_SPREAD", 1)  # these have few experts
    module = next(iter(modules(family))).to(device, dtype)
    for parameter in module.parameters():  # biases begin at zero
        parameter.data.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    x = torch.randn(tokens, module.down_proj.shape[2 if module.is_transposed else 1], device=device, dtype=dtype)
    weights, index = torch.randn(tokens, module.num_experts, device=device, dtype=dtype).softmax(-1).topk(3)
    weights, index = weights[:, :2], index[:, :2]  # rows of them lie apart
    with torch.inference_mode():
        ours = module(x, index, weights)
        assert module.config._experts_implementation == experts.NAME
        monkeypatch.setattr(module.config, "_experts_implementation_internal", "eager")
        theirs = module(x, index, weights)
    assert ours.dtype is dtype
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


def test_the_pairs_of_one_token_are_not_sorted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sort(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(kernels, "sort_pairs", sort)
    monkeypatch.setattr(expert_rows, "_SPREAD", 1)
    module = next(iter(modules("qwen3_5_moe"))).to(device, torch.bfloat16)
    x = torch.randn(module.num_experts + 1, module.down_proj.shape[1], device=device, dtype=torch.bfloat16)
    index = torch.zeros(len(x), 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        module(x[:-1], index[:-1], x[:-1, :1])
        with pytest.raises(AssertionError, match="sorted"):
            module(x, index, x[:, :1])


def test_a_norm_behind_each_expert(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no family of the table has."""
    torch.manual_seed(0)
    module = next(iter(modules("qwen3_5_moe"))).to(device)
    x = torch.randn(5, module.down_proj.shape[1], device=device)
    weights, index = torch.randn(5, module.num_experts, device=device).softmax(-1).topk(2)
    with torch.inference_mode():
        plain = module(x, index, weights)
        monkeypatch.setattr(module, "has_post_expert_norm", True, raising=False)
        monkeypatch.setattr(module, "post_expert_norm", lambda rows: 3 * rows, raising=False)
        torch.testing.assert_close(module(x, index, weights), 3 * plain)


def test_a_model_without_experts_is_left_alone() -> None:
    assert not modules("gemma3")
