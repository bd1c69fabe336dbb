"""Decodes of Mamba-2 and of lightning attention in place, in an arena of NaN, against the CPU's operations.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.lanes import COUNTS, Lanes, check_operation
from torch import Tensor
from torch.nn import functional

from isthmus.kernels.lightning import lightning_attention
from isthmus.kernels.ssd import ssd
from isthmus.kernels.ssd_decode import lightning_decode, ssd_decode

SHAPES = [(2, 6, 12, 20), (1, 1, 16, 16), (3, 3, 70, 8), (1, 2, 40, 256)]
"""Groups, heads, P, N: the last's heads take several programs."""


def slices(device: str, tokens: int, dtype: torch.dtype, *shapes: tuple[int, int]) -> tuple[Tensor, ...]:
    """Of what a projection gives: `[tokens, *shape]` each, side by side in its rows, behind something else."""
    widths = [heads * width for heads, width in shapes]
    parts = torch.split(torch.randn(tokens, 3 + sum(widths), device=device).to(dtype), [3, *widths], 1)
    return tuple(torch.unflatten(part, 1, shape) for part, shape in zip(parts[1:], shapes, strict=True))


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 1.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "heads", "p", "n"), SHAPES)
def test_mamba2(
    device: str, groups: int, heads: int, p: int, n: int, dtype: torch.dtype, limit: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    lanes = Lanes.of(device, (heads, p, n))
    value, key, query, dt = slices(device, 9, dtype, (heads, p), (groups, n), (groups, n), (heads, 1))
    dt_bias, skip = (torch.randn(heads, device=device).to(dtype) for _ in range(2))
    rate = -torch.linspace(0.1, 6, heads, device=device)
    out = lanes.blank(heads, p, dtype=dtype)
    ssd_decode(*lanes.on_device(), query, key, value, 3 * dt[..., 0], dt_bias, rate, skip, out, limit=limit, early=True)
    given = (lanes.rows(x) for x in (query, key, value, 3 * dt[..., 0]))
    constant = (x.cpu().float() for x in (dt_bias, rate, skip))
    lanes.check(out, ssd(lanes.step(), lanes.cpu, *given, *constant, limit=limit), atol=1e-4)


def test_step_sizes_are_softplus_to_the_last_digits(device: str) -> None:
    """Far below zero it is the exponential, where `1 + exp(dt)` would have lost it; above 20 it is dt itself."""
    dt = torch.tensor([[-80.0], [-15.0], [-6.0], [-0.1], [0.0], [3.0], [19.9], [20.1], [200.0]], device=device)
    view, zero = torch.zeros(10, 1, 1, 4, device=device), torch.zeros(1, device=device)
    one = torch.ones(9, 1, 1, device=device)
    lanes = torch.arange(1, 10, device=device), torch.ones(9, dtype=torch.bool, device=device)
    out = torch.empty_like(one)
    ssd_decode(view, *lanes, torch.arange(9, device=device), *_rows(one), dt, zero, zero, zero, out, early=True)
    torch.testing.assert_close(out[:, 0].double(), functional.softplus(dt.double()), rtol=1e-5, atol=0)


def _rows(one: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, of which a state and what is read of it are the step size."""
    unit = functional.pad(one, (0, 3))
    return unit, unit, one


def test_what_is_no_number_stays_none(device: str) -> None:
    """A limit does not make a number of a step size that is none, as on the CPU: the fault shows."""
    torch.manual_seed(0)
    lanes = Lanes.of(device, (1, 4, 4))
    row, head = torch.ones(9, 1, 4, device=device), torch.ones(1, device=device)
    out = lanes.blank(1, 4, dtype=torch.float32)
    dt = torch.full((9, 1), float("nan"), device=device)
    ssd_decode(*lanes.on_device(), row, row, row, dt, head, -head, head, out, limit=(0.1, 1.0), early=True)
    assert lanes.rows(out).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "v", "k"), [(6, 12, 20), (1, 64, 128), (3, 70, 8)])
def test_lightning(device: str, heads: int, v: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lanes = Lanes.of(device, (heads, v, k))
    (together,) = slices(device, 9, dtype, (heads, 2 * k + v))  # a head's query, key and value lie side by side
    query, key, value = torch.split(together, [k, k, v], -1)
    slope = torch.linspace(0, 2, heads, device=device)
    out = lanes.blank(heads, v, dtype=dtype)
    lightning_decode(*lanes.on_device(), query, key, value, slope, out, early=True)
    query, key, value = (lanes.rows(x) for x in (query, key, value))
    lanes.check(out, lightning_attention(lanes.step(), lanes.cpu, query, key, value, slope.cpu()))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_mamba2_of_a_step(device: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value, dt = slices("cpu", 90, torch.float32, (2, 7), (2, 7), (6, 5), (6, 1))
    inputs = query, key, value, dt[..., 0], torch.randn(6), -torch.linspace(0.1, 6, 6), torch.randn(6)
    check_operation(device, ssd, counts, (6, 5, 7), *inputs, tokens=4, limit=(0.1, 2.0))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_lightning_of_a_step(device: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    (together,) = slices("cpu", 90, torch.float32, (3, 19))
    inputs = *torch.split(together, [7, 7, 5], -1), torch.linspace(0, 2, 3)
    check_operation(device, lightning_attention, counts, (3, 5, 7), *inputs, tokens=3)
