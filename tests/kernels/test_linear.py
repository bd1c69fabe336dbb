"""Products of few rows against float64. Without a GPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.kernels.linear import MOST_ROWS, TILES, Config, config_of, linear, parts_of

SMALL = Config(16, 16, 32, 4, 3, 2)
SHAPES = [(16, 32), (70, 96), (33, 160), (1, 8), (200, 1000), (33, 2080)]
"""(outputs, inputs): whole blocks, and not; fewer than a block; a last part of fewer blocks than come ahead."""


def counters(device: str) -> Tensor:
    return torch.zeros(64, dtype=torch.int32, device=device)


def rows_of(rows: int, inputs: int, device: str, dtype: torch.dtype) -> Tensor:
    """That lie apart, with NaN between them."""
    wider = torch.full((rows, inputs + 16), float("nan"), device=device, dtype=dtype)
    wider[:, :inputs] = torch.randn(rows, inputs)
    return wider[:, :inputs]


@pytest.mark.parametrize("cores", [1, 8, 132])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products(device: str, outputs: int, inputs: int, rows: int, bias: bool, cores: int) -> None:
    """Whole, and in as many parts as so many cores ask for: the same counters serve one launch after the other."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = rows_of(rows, inputs, device, dtype), torch.randn(outputs, inputs, device=device).to(dtype)
        offset = torch.randn(outputs, device=device).to(dtype) if bias else None
        used = counters(device)
        found = [linear(x, weight, offset, used, SMALL, multiprocessors=cores) for _ in range(2)]
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        scale = expected.abs().max()
        assert found[0].dtype is dtype
        torch.testing.assert_close(found[0].double() / scale, expected / scale, rtol=0, atol=8e-3)
        assert torch.equal(found[0], found[1]), "no result depends on who is last"
        assert not used.any()


def test_nothing_of_no_rows(device: str) -> None:
    x = torch.empty(0, 32, device=device, dtype=torch.bfloat16)
    weight = torch.empty(16, 32, device=device, dtype=torch.bfloat16)
    assert linear(x, weight, None, counters(device), SMALL).shape == (0, 16)


@pytest.mark.parametrize("cores", [1, 40, 132, 528])
@pytest.mark.parametrize(("outputs", "inputs"), [(1152, 6912), (1536, 1152), (13824, 1152), (262144, 640), (8, 16)])
def test_parts_are_all_of_the_inputs_and_none_is_empty(outputs: int, inputs: int, cores: int) -> None:
    built = config_of(1, 2)
    assert built is not None
    parts, blocks = parts_of(outputs, inputs, built, cores), -(-inputs // built.block_k)
    tiles = -(-outputs // built.block_n)
    each = -(-blocks // parts)
    assert each * (parts - 1) < blocks
    assert parts == 1 or tiles * parts <= 2 * cores, "all run at once"
    assert tiles <= TILES


def test_what_is_left_to_a_library() -> None:
    assert config_of(MOST_ROWS, 2) is not None
    assert config_of(MOST_ROWS + 1, 2) is None, "as fast there"
    assert config_of(1, 4) is None, "float32 is what is compared with Transformers"
