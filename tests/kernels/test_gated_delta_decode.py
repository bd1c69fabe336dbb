"""Decodes of delta rules and convolutions in place, in an arena of NaN, against the CPU's operations.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.lanes import Lanes

from isthmus.kernels.causal_conv_decode import causal_conv_decode
from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.gated_delta_decode import TILE, Tile, gated_delta_decode
from isthmus.kernels.kda import kimi_delta_rule
from isthmus.kernels.states import causal_conv

SHAPES = [(2, 6, 12, 20), (1, 1, 16, 16), (3, 3, 8, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "k_dim", "v_dim"), SHAPES)
def test_delta_rule(
    device: str, key_heads: int, heads: int, k_dim: int, v_dim: int, channels: bool, dtype: torch.dtype
) -> None:
    check_delta_rule(device, (key_heads, heads, k_dim, v_dim), channels, dtype, TILE)


@pytest.mark.parametrize("tile", [Tile(8, 1), Tile(64, 2)])
def test_delta_rule_in_other_tiles(device: str, tile: Tile) -> None:
    check_delta_rule(device, (3, 3, 8, 70), True, torch.float32, tile)


def check_delta_rule(
    device: str, shape: tuple[int, int, int, int], channels: bool, dtype: torch.dtype, tile: Tile
) -> None:
    key_heads, heads, k_dim, v_dim = shape
    torch.manual_seed(0)
    lanes = Lanes.of(device, (heads, k_dim, v_dim), torch.float32)
    keys, values = key_heads * k_dim, heads * v_dim
    # Slices of what a convolution gives.
    query, key, value = torch.split(torch.randn(9, 2 * keys + values, device=device).to(dtype), [keys, keys, values], 1)
    query, key = torch.unflatten(query, 1, (-1, k_dim)), torch.unflatten(key, 1, (-1, k_dim))
    value = torch.unflatten(value, 1, (-1, v_dim))
    decay = -3 * torch.rand((9, heads, k_dim) if channels else (9, heads), device=device)
    beta = 2 * torch.rand(9, heads, device=device).to(dtype)
    out = lanes.blank(heads, v_dim, dtype=dtype)
    gated_delta_decode(*lanes.on_device(), query, key, value, decay, beta, out, tile=tile, early=True)
    rule = kimi_delta_rule if channels else gated_delta_rule
    expected = rule(lanes.step(), lanes.cpu, *(lanes.rows(x) for x in (query, key, value, decay, beta)))
    lanes.check(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "channels"), [(4, 600), (2, 30), (7, 16)])
def test_convolution(device: str, width: int, channels: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lanes = Lanes.of(device, (width - 1, channels), dtype)
    x = torch.randn(9, channels + 5, device=device).to(dtype)[:, :channels]
    weight = torch.randn(channels, width, device=device).to(dtype)
    b = torch.randn(channels, device=device).to(dtype) if bias else None
    out = lanes.blank(channels, dtype=dtype)
    causal_conv_decode(*lanes.on_device(), x, weight, b, out, early=True)
    expected = causal_conv(lanes.step(), lanes.cpu, lanes.rows(x), weight.cpu(), None if b is None else b.cpu())
    lanes.check(out, expected)
