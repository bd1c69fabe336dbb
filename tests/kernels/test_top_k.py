"""The largest of short rows against a stable sort. Without a GPU through Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isthmus.kernels.top_k import DTYPES, MOST, WIDEST, top_k

WIDTHS = (1, 5, 32, 100, 128, 512, 1000)
INF, NAN = math.inf, math.nan
BITS = {2: torch.int16, 4: torch.int32}


def expected(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of equal numbers the first first, where torch leaves open which."""
    values, indices = x.cpu().sort(dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def check(x: Tensor, k: int) -> None:
    """The very numbers, bit for bit, and their places."""
    values, indices = top_k(x, k, early=False)
    wanted, places = expected(x, k)
    assert values.dtype is x.dtype
    assert indices.dtype is torch.int64
    assert indices.cpu().tolist() == places.tolist()
    bits = BITS[x.itemsize]
    assert torch.equal(values.cpu().view(bits), wanted.contiguous().view(bits))
    largest = x.cpu().topk(k).values
    torch.testing.assert_close(values.cpu(), largest, rtol=0, atol=0, equal_nan=True)


def rows_of(numbers: Tensor, device: str) -> Tensor:
    """That lie apart, with NaN between them: whoever reads it, has it among the largest."""
    rows, n = numbers.shape
    wider = torch.full((rows, n + 3), NAN, device=device, dtype=numbers.dtype)
    wider[:, :n] = numbers
    return wider[:, :n]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_the_largest_come_first(dtype: torch.dtype, n: int, device: str) -> None:
    """Of few values, so that there are ties, and of many."""
    torch.manual_seed(n)
    for k in range(1, min(n, 10) + 1):
        numbers = torch.cat((torch.randn(2, n), torch.randint(-3, 4, (1, n)))).to(dtype)
        check(numbers.to(device), k)
        check(rows_of(numbers, device), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row",
    [
        [NAN] * 7,
        [1.0, NAN, INF, NAN, 2.0, -INF, NAN],
        [INF, -INF, INF, -INF, INF, 0.0, -1.0],
        [-INF] * 7,
        [0.25] * 7,
        [-0.0, 0.0, -1.0, 0.0, -0.0, -2.0, -0.0],
        [6e-8, -6e-8, 0.0, 1.2e-7, -0.0, 6e-8, 0.0],
        [-3.0, -1.0, -2.0, -1.0, -65504.0, -6e-8, -INF],
    ],
    ids=str,
)
def test_no_number_is_special(row: list[float], dtype: torch.dtype, device: str) -> None:
    """Every place is of the row and comes once; what has no order is largest; zeros are equal, and as they were."""
    x = torch.tensor([row, row[::-1]], dtype=dtype, device=device)
    for k in range(1, len(row) + 1):
        check(x, k)
    assert top_k(x, len(row), early=False)[1].sort(-1).values.tolist() == [list(range(len(row)))] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_the_bits_are(dtype: torch.dtype, device: str) -> None:
    """All of 16, some of 32: NaN of both signs and any payload, subnormal numbers."""
    torch.manual_seed(0)
    if dtype is torch.float32:
        bits = torch.randint(-(1 << 31), 1 << 31, (4, 512), dtype=torch.int32)
        bits[:, ::8] |= -1 << 23
    else:
        bits = torch.randperm(1 << 16).view(-1, 512).to(torch.int16)
    check(bits.view(dtype).to(device), 4)
    small = bits.view(dtype)[:4].sort().values[:, :300]
    check(small.to(device), 10)


def test_all_that_may_be_asked_for(device: str) -> None:
    check(torch.randn(1, WIDEST, device=device), MOST)
    check(torch.randn(2, MOST, device=device), MOST)


def test_rows_anywhere(device: str) -> None:
    """One of a wider tensor, the same one again and again, every second, from the last to the first place."""
    many = torch.randn(6, 40, device=device)
    for x in (many[2:3, 5:17], many[1:2].expand(4, 40), many[::2], many[:, 3:], many[:, 3:4], many.t()[7:8, 2:3]):
        check(x, min(4, x.shape[1]))


def test_nothing_of_no_rows(device: str) -> None:
    values, indices = top_k(torch.empty(0, 32, device=device, dtype=torch.bfloat16), 4, early=False)
    assert values.shape == indices.shape == (0, 4)
    assert values.dtype is torch.bfloat16
    assert indices.dtype is torch.int64


def test_more_than_there_are() -> None:
    for n, k in ((4, 5), (4, 0), (100, MOST + 1), (WIDEST + 1, 1)):
        with pytest.raises(AssertionError):
            top_k(torch.empty(2, n), k, early=False)
    with pytest.raises(AssertionError):
        top_k(torch.empty(2, 4, dtype=torch.float64), 2, early=False)
    with pytest.raises(AssertionError):
        top_k(torch.empty(4, 2).t(), 2, early=False)
