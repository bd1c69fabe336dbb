"""Linear layers of a model, taken over: which ones, and that nothing but the product is another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.kernels.linear import MOST_ROWS
from isthmus.model import linear
from isthmus.model.linear import DeviceLinear


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
