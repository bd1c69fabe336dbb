"""Decodes of the real-gated linear recurrent unit in place, in an arena of NaN, against the CPU's operation.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.lanes import COUNTS, Lanes, check_operation
from torch import Tensor

from isthmus.kernels.rglru import rglru
from isthmus.kernels.rglru_decode import rglru_decode


def draw(device: str, tokens: int, dtype: torch.dtype, channels: int) -> tuple[Tensor, Tensor]:
    """x, a slice of wider rows, and decay."""
    x = torch.randn(tokens, channels + 3, device=device).to(dtype)[:, 3:]
    return x, (-4 * torch.rand(tokens, channels, device=device) ** 4 - 1e-3).to(dtype)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 30, 600])
def test_rglru(device: str, channels: int, dtype: torch.dtype, state: torch.dtype) -> None:
    torch.manual_seed(0)
    lanes = Lanes.of(device, (channels,), state)
    x, decay = draw(device, 9, dtype, channels)
    out = lanes.blank(channels, dtype=dtype)
    rglru_decode(*lanes.on_device(), x, decay, out, early=True)
    lanes.check(out, rglru(lanes.step(), lanes.cpu, lanes.rows(x), lanes.rows(decay)))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rglru_of_a_step(device: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    check_operation(device, rglru, counts, (5,), *draw("cpu", 90, torch.float32, 5), tokens=2)
