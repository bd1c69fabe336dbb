"""Optimising changes speed, never what is computed beyond the rounding of bf16."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from isthmus.engine.step import Sampled, SampleRow
from isthmus.model.optimize import Merged, MergedPart, PackedLinear, optimize
from tests.model.families import ATTENTION, FAMILIES, config_of
from tests.model.harness import paged, tiny
from tests.model.test_families import Served

SUPPORTED = torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bf16 = pytest.mark.skipif(not SUPPORTED, reason="this CPU has no bf16 instructions that oneDNN uses")


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(tokens).logits
    return out.float()


def served(model: PreTrainedModel, *, optimised: bool) -> torch.Tensor:
    """Logits behind two prompts, of one token and of forty, and two steps more, as the runner computes them."""
    model = copy.deepcopy(model)
    engine = Served(model)
    if optimised:
        report = optimize(model)
        assert report.reason is None
        assert report.packed > 0
    seen = []

    def sampler(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        seen.append(logits.float())
        return [Sampled(7) for _ in rows]

    engine.runner.sampler = sampler
    engine.generate([[5], list(range(5, 45))], 3)
    return torch.cat(seen)


@needs_bf16
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str) -> None:
    """Closer to the fp32 model than twice the error of plain bf16."""
    model_type, values = config_of(family)
    exact = paged(tiny(model_type, **values))
    plain = copy.deepcopy(exact).to(torch.bfloat16)
    expected = served(exact, optimised=False)
    slow, quick = (served(plain, optimised=optimised) for optimised in (False, True))
    assert (quick - expected).abs().mean() < 2 * (slow - expected).abs().mean() + 1e-3


@needs_bf16
@pytest.mark.parametrize("family", ATTENTION)
def test_projections_of_one_input_are_merged(family: str) -> None:
    model_type, values = config_of(family)
    merged = optimize(tiny(model_type, **values).to(torch.bfloat16)).merged
    assert merged > 0 or family == "phi3"  # whose are merged already


@needs_bf16
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_next", {"in_proj_qkvz", "in_proj_ba"}),
        ("qwen3_5", {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}),
        ("olmo_hybrid", {"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"}),
        ("deepseek_v3", {"kv_a_proj_with_mqa"}),
        ("recurrent_gemma", {"linear_x", "linear_y"}),
        ("minimax", {"qkv_proj", "output_gate"}),
        ("lfm2", {"w1", "w3"}),
    ],
)
def test_projections_of_other_mixers_are_merged(family: str, names: set[str]) -> None:
    model_type, values = config_of(family)
    model = tiny(model_type, **values).to(torch.bfloat16)
    optimize(model)
    parts = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, MergedPart)}
    assert names <= parts


@needs_bf16
def test_a_tied_embedding_is_still_looked_up() -> None:
    values: dict[str, Any] = {**FAMILIES["llama"][1], "tie_word_embeddings": True}
    model = tiny("llama", **values).to(torch.bfloat16)
    tokens = torch.arange(5, 30)[None]
    before = logits(model, tokens)
    optimize(model)
    assert isinstance(model.lm_head, PackedLinear)
    torch.testing.assert_close(logits(model, tokens), before, rtol=0.1, atol=0.2)


def test_fp32_is_left_alone() -> None:
    """It is what greedy tokens are compared with."""
    model = tiny("llama", **FAMILIES["llama"][1])
    before = [type(module) for module in model.modules()]
    report = optimize(model)
    assert "float32" in str(report)
    assert [type(module) for module in model.modules()] == before


@needs_bf16
def test_biases_survive() -> None:
    torch.manual_seed(0)
    block = nn.Module()
    block.q_proj, block.k_proj, block.v_proj = (nn.Linear(16, n, dtype=torch.bfloat16) for n in (8, 4, 4))
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    expected = [block.q_proj(x), block.k_proj(x), block.v_proj(x)]
    report = optimize(block)
    assert (report.merged, report.packed) == (2, 1)
    with torch.inference_mode():
        for want, part in zip(expected, (block.q_proj, block.k_proj, block.v_proj), strict=True):
            torch.testing.assert_close(part(x), want.detach(), rtol=2e-2, atol=2e-2)


def test_only_layers_that_fit_are_merged() -> None:
    """A layer without v (gemma4 with K = V), one with different biases, and one that is no plain linear layer."""

    class Odd(nn.Linear):
        pass

    for layers, merged in (
        ({"q_proj": nn.Linear(8, 4), "k_proj": nn.Linear(8, 2), "v_proj": None}, 1),
        ({"q_proj": nn.Linear(8, 4), "k_proj": nn.Linear(8, 2, bias=False)}, 0),
        ({"gate_proj": nn.Linear(8, 4), "up_proj": Odd(8, 4)}, 0),
        ({"q_proj": nn.Linear(8, 4), "k_proj": nn.Linear(6, 4)}, 0),
    ):
        block = nn.Module()
        for name, layer in layers.items():
            setattr(block, name, layer.to(torch.bfloat16) if layer is not None else None)
        if SUPPORTED:
            assert optimize(block).merged == merged


class Mlp(nn.Module):
    """What most families have, and where one may differ."""

    def __init__(self, act: nn.Module, *, twice: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down_proj = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
        self.act_fn = act
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x))
        out: torch.Tensor = self.down_proj((2 * gate if self.twice else gate) * self.up_proj(x))
        return out


@needs_bf16
@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "silu"])
def test_an_activation_moves_into_its_gate(act: str) -> None:
    torch.manual_seed(0)
    mlp = Mlp(ACT2FN[act])
    x = 3 * torch.randn(1, 40, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = mlp(x)
        assert optimize(mlp).gated == 1
        torch.testing.assert_close(mlp(x), expected, rtol=3e-2, atol=3e-2)


@needs_bf16
def test_an_mlp_that_does_more_keeps_its_activation() -> None:
    """Recognised by what it computes; also an activation oneDNN has no exact name for stays."""
    torch.manual_seed(0)
    for mlp in (Mlp(ACT2FN["silu"], twice=True), Mlp(ACT2FN["relu2"])):
        x = torch.randn(1, 40, 32, dtype=torch.bfloat16)
        with torch.inference_mode():
            expected = mlp(x)
            report = optimize(mlp)
            assert (report.gated, report.merged, report.packed) == (0, 1, 2)
            torch.testing.assert_close(mlp(x), expected, rtol=3e-2, atol=3e-2)


def test_parts_follow_their_input() -> None:
    """Any order of calls, other inputs in between, and nothing kept once every part was fetched."""
    torch.manual_seed(0)
    linears = [nn.Linear(6, n) for n in (4, 3, 2)]
    merged = Merged(linears)
    parts = [MergedPart(merged, i) for i in range(3)]
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    with torch.inference_mode():
        for index, value in ((0, x), (1, x), (2, x), (2, y), (0, x), (0, x), (1, y), (2, y), (0, y)):
            torch.testing.assert_close(parts[index](value), linears[index](value))
    assert merged._input is None
    assert merged._parts == {}
