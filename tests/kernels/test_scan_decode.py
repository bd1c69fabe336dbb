"""Decodes of the selective scan in place, in an arena of NaN, against the CPU's operation.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.lanes import COUNTS, Lanes, check_operation
from torch import Tensor

from isthmus.kernels.scan_decode import scan_decode
from isthmus.kernels.selective_scan import selective_scan

SHAPES = [(1, 150, 16), (2, 70, 3), (3, 1, 5), (1, 9, 256)]
"""Heads, channels of each, N."""


def draw(device: str, tokens: int, dtype: torch.dtype, heads: int, d: int, n: int) -> tuple[Tensor, ...]:
    """x, dt, B, C; rate, skip. A head's x and dt lie side by side, and so do its B and C."""
    x, dt = torch.split(torch.randn(tokens, heads, 2 * d, device=device).to(dtype), [d, d], -1)
    _, b, c = torch.split(torch.randn(tokens, heads, 3 + 2 * n, device=device).to(dtype), [3, n, n], -1)
    rate, skip = -8 * torch.rand(heads, d, n, device=device), torch.randn(heads, d, device=device).to(dtype)
    return x, 4 * dt - 1, b, c, rate, skip


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "d", "n"), SHAPES)
def test_scan(device: str, heads: int, d: int, n: int, dtype: torch.dtype, state: torch.dtype) -> None:
    """More lanes than a program has, and a last one that has fewer."""
    torch.manual_seed(0)
    lanes = Lanes.of(device, (heads, d, n), state)
    x, dt, b, c, rate, skip = draw(device, 9, dtype, heads, d, n)
    dt[3:6] += 20  # where softplus is straight
    out = lanes.blank(heads, d, dtype=dtype)
    scan_decode(*lanes.on_device(), x, dt, b, c, rate, skip, out, early=True)
    x, dt, b, c = (lanes.rows(t) for t in (x, dt, b, c))
    lanes.check(out, selective_scan(lanes.step(), lanes.cpu, x, dt, b, c, rate.cpu(), skip.cpu().float()))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_scan_of_a_step(device: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    inputs = draw("cpu", 90, torch.float32, 2, 5, 3)
    check_operation(device, selective_scan, counts, (2, 5, 3), *inputs, tokens=4)
