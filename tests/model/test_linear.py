"""Linear layers of a model, taken over: which ones, and that nothing but the product is another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from isthmus.kernels import dependent
from isthmus.kernels import linear as kernels
from isthmus.kernels.linear import MOST_ROWS
from isthmus.model import linear
from isthmus.model.compile import prepare
from isthmus.model.linear import DeviceLinear
from tests.model.families import config_of
from tests.model.harness import tiny


class Odd(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def model(device: str) -> nn.ModuleDict:
    layers = {"plain": nn.Linear(40, 24), "bare": nn.Linear(40, 24, bias=False), "odd": Odd(40, 24)}
    return nn.ModuleDict(layers).to(device, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_as_torch_does(device: str, rows: int) -> None:
    torch.manual_seed(0)
    layers = model(device)
    x = torch.randn(1, rows, 40, device=device).to(torch.bfloat16)
    with torch.inference_mode():
        before = {name: layer(x) for name, layer in layers.items()}
        assert linear.use(layers) == 2
        for name, layer in layers.items():
            found = layer(x)
            assert found.shape == before[name].shape
            torch.testing.assert_close(found, before[name], rtol=8e-3, atol=8e-3)
            if rows > MOST_ROWS:
                assert torch.equal(found, before[name]), "torch's own product"


def test_one_row_has_a_kernel_of_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def several(*_: object) -> None:
        raise AssertionError("for more rows")

    monkeypatch.setattr(kernels, "linear", several)
    layers = model(device)
    linear.use(layers)
    x = torch.randn(2, 40, device=device).to(torch.bfloat16)
    with torch.inference_mode():
        layers["plain"](x[:1])
        with pytest.raises(AssertionError, match="for more rows"):
            layers["plain"](x)


def test_which_are_taken_over(device: str) -> None:
    layers = model(device)
    linear.use(layers)
    assert {name: type(layer) for name, layer in layers.items()} == {
        "plain": DeviceLinear, "bare": DeviceLinear, "odd": Odd,
    }  # fmt: skip
    assert layers["plain"].counters is layers["bare"].counters
    assert "plain.counters" not in layers.state_dict()
    assert linear.use(nn.Linear(4, 4)) == 0, "float32"


def test_views_of_any_shape(device: str) -> None:
    """Rows that do not lie behind each other, and none."""
    layer = nn.Linear(40, 24).to(device, torch.bfloat16)
    linear.use(layer)
    x = torch.randn(2, 80, 3, device=device).to(torch.bfloat16)
    turned = x[:, ::2].transpose(1, 2)
    for given in (turned, turned[:1], turned[:, :0]):
        expected = nn.functional.linear(given, layer.weight, layer.bias)
        found = layer(given)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=8e-3, atol=8e-3)


class Router(nn.Module):
    """Multiplies its parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 40)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        product = nn.functional.linear
        plain = [product(x, self.weight, self.bias), product(x, self.weight), product(x, self.weight, bias=self.bias)]
        return [*plain, product(x, self.weight * 2), product(x.float(), self.weight.float()), product(x, x)]


@pytest.mark.parametrize("rows", [1, 3])
def test_bare_products_with_parameters_are_taken_over(device: str, rows: int) -> None:
    """And no others: weights that the forward computes are not there early."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = nn.ModuleDict({"plain": nn.Linear(40, 40, bias=False), "router": Router()}).to(device, torch.bfloat16)
    x = torch.randn(rows, 40, device=device).to(torch.bfloat16)
    taken = []

    def backend(graph: GraphModule, inputs: object) -> Callable[..., object]:
        taken.append(linear.take_bare(graph))
        return graph.forward

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = layers["router"](layers["plain"](x))
        return found

    with torch.inference_mode():
        expected = forward(x)
        assert torch.compile(forward, backend=backend)(x)[0].equal(expected[0])
        linear.use(layers)
        torch._dynamo.reset()
        found = torch.compile(forward, backend=backend)(x)
    assert taken == [0, 3], "without a layer of ours there are no counters"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_plain_path_has_torchs_products(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever doubts ours compares with it."""
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    model_type, values = config_of("gemma3")
    model = tiny(model_type, **values).to(torch.bfloat16)
    limit = torch._dynamo.config.recompile_limit
    try:
        prepare(model, compiled=compiled)
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert any(isinstance(module, DeviceLinear) for module in model.modules()) is compiled


def test_kernels_begin_early_only_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    for can in (False, True):
        monkeypatch.setattr(dependent, "is_dependent", lambda can=can: can)
        assert dependent.dependent_launch(wanted=False) == {"DEPENDENT": False}
        assert dependent.dependent_launch()["DEPENDENT"] is can
        assert ("launch_pdl" in dependent.dependent_launch()) is can
