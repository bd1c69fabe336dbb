"""Products of one row against float64. Without a GPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from isthmus.kernels.linear_row import RowConfig, linear_row, row_config

SHAPES = [(16, 32), (70, 96), (33, 160), (1, 8), (5, 1000), (200, 520)]
"""(outputs, inputs): whole blocks, and not; fewer than come ahead; fewer than a block."""

BUILDS = [RowConfig(2, 128, 4, 1, 2), RowConfig(16, 64, 4, 3, 2), RowConfig(4, 256, 4, 2, 0)]


@pytest.mark.parametrize("built", BUILDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products(device: str, outputs: int, inputs: int, dtype: torch.dtype, bias: bool, built: RowConfig) -> None:
    """Between numbers that are none: of the row, and behind the last of the weight and of the bias."""
    torch.manual_seed(0)
    apart = torch.full((1, inputs + 2048), float("nan"), device=device, dtype=dtype)
    apart[:, :inputs] = torch.randn(inputs)
    behind = torch.full((outputs * inputs + 8192,), float("nan"), device=device, dtype=dtype)
    weight = behind[: outputs * inputs].view(outputs, inputs).copy_(torch.randn(outputs, inputs))
    offsets = torch.full((outputs + 64,), float("nan"), device=device, dtype=dtype)
    offset = offsets[:outputs].copy_(torch.randn(outputs)) if bias else None
    x = apart[:, :inputs]
    found = linear_row(x, weight, offset, built)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    scale = expected.abs().max()
    assert found.dtype is dtype
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=8e-3)


@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 1024), (2561, 520), (5121, 260), (10_241, 300)])
def test_the_builds_that_are_used(device: str, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, inputs, device=device).bfloat16(), torch.randn(outputs, inputs, device=device).bfloat16()
    expected = x.double() @ weight.double().T
    scale = expected.abs().max()
    torch.testing.assert_close(linear_row(x, weight, None).double() / scale, expected / scale, rtol=0, atol=8e-3)


def test_wide_layers_have_more_outputs_a_program() -> None:
    blocks = [row_config(outputs).block_n for outputs in (1, 2560, 2561, 5120, 5121, 10_240, 10_241, 262_144)]
    assert blocks == [2, 2, 4, 4, 8, 8, 16, 16]
