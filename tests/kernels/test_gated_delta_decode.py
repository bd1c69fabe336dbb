"""Decodes of delta rules and convolutions in place, in an arena of NaN, against the CPU's operations.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.kernels.causal_conv_decode import causal_conv_decode
from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.gated_delta_decode import gated_delta_decode
from isthmus.kernels.kda import kimi_delta_rule
from isthmus.kernels.states import StateStep, causal_conv, state_view
from isthmus.memory import Group, state_spec

LANES = 7
PADDING = 2  # this lane is nobody's
FRESH = [1, 4]
TOKENS = [3, 0, 8, 5, 1, 2, 7]  # of a flat batch of nine
SHAPES = [(2, 6, 12, 20), (1, 1, 16, 16), (3, 3, 8, 70)]


@dataclass
class Lanes:
    """A part of state pages, on a device and as the CPU has it."""

    device: str
    view: Tensor
    cpu: Tensor
    pages: np.ndarray
    fresh: np.ndarray

    @classmethod
    def of(cls, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Lanes:
        name = str(dtype).removeprefix("torch.")
        group = Group("state", state_spec([("0.x", (3,), "bfloat16"), ("1.x", shape, name)]), "state")
        pages = np.random.default_rng(0).permutation(np.arange(1, LANES + 3))[:LANES]
        pages[PADDING] = 0
        fresh = np.isin(np.arange(LANES), FRESH)
        arena = torch.full(((LANES + 4) * group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
        known = pages[~fresh & (pages > 0)]
        state_view(arena, group, "1.x")[known] = torch.randn(len(known), *shape).to(dtype)
        there = arena.to(device, copy=True)
        return cls(device, state_view(there, group, "1.x"), state_view(arena, group, "1.x"), pages, fresh)

    def on_device(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the kernels take them."""
        tokens = torch.tensor(TOKENS, dtype=torch.int32, device=self.device)
        pages = torch.from_numpy(self.pages.astype(np.int32)).to(self.device)
        return self.view, pages, torch.from_numpy(self.fresh).to(self.device), tokens

    @property
    def live(self) -> np.ndarray:
        return np.flatnonzero(self.pages)

    def step(self) -> StateStep:
        """Of the lanes that are somebody's."""
        live = self.live
        return StateStep.of(np.arange(len(live) + 1), np.where(self.fresh[live], 0, 9), self.pages[live])

    def rows(self, x: Tensor) -> Tensor:
        """Those lanes' rows of the flat batch."""
        return x.cpu()[np.array(TOKENS)[self.live]]

    def check(self, out: Tensor, expected: Tensor) -> None:
        """Outputs (but for their rounding) and pages are as the CPU has them; padding is zero, others are as before."""
        rounding = torch.finfo(out.dtype).eps
        torch.testing.assert_close(self.rows(out), expected, rtol=rounding, atol=1e-5)
        torch.testing.assert_close(self.view.cpu(), self.cpu, rtol=0, atol=1e-5, equal_nan=True)
        assert not out[TOKENS[PADDING]].any(), "padding lanes must hold numbers: later layers compute with them"
        assert (out[[row for row in range(9) if row not in TOKENS]] == 77).all()


def blank(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "k_dim", "v_dim"), SHAPES)
def test_delta_rule(
    device: str, key_heads: int, heads: int, k_dim: int, v_dim: int, channels: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lanes = Lanes.of(device, (heads, k_dim, v_dim), torch.float32)
    keys, values = key_heads * k_dim, heads * v_dim
    # Slices of what a convolution gives.
    query, key, value = torch.split(torch.randn(9, 2 * keys + values, device=device).to(dtype), [keys, keys, values], 1)
    query, key = torch.unflatten(query, 1, (-1, k_dim)), torch.unflatten(key, 1, (-1, k_dim))
    value = torch.unflatten(value, 1, (-1, v_dim))
    decay = -3 * torch.rand((9, heads, k_dim) if channels else (9, heads), device=device)
    beta = 2 * torch.rand(9, heads, device=device).to(dtype)
    out = blank(device, 9, heads, v_dim, dtype=dtype)
    gated_delta_decode(*lanes.on_device(), query, key, value, decay, beta, out)
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
    out = blank(device, 9, channels, dtype=dtype)
    causal_conv_decode(*lanes.on_device(), x, weight, b, out)
    expected = causal_conv(lanes.step(), lanes.cpu, lanes.rows(x), weight.cpu(), None if b is None else b.cpu())
    lanes.check(out, expected)
