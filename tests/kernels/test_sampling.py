"""Tokens are the first maximum, or the exact inverse of the distribution that a row's parameters define."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_sampler import exact
from torch import Tensor

from isthmus.engine.draw import draw
from isthmus.kernels import sampling
from isthmus.kernels.sampling import GREEDY, choose, greedy
from isthmus.params import SamplingParams

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan
LAST = 1 - 2**-53

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 3.0},
    {"temperature": 0.7, "top_k": 9},
    {"top_k": 30},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 900, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.5},
    {"top_p": 0.99999},
    {"min_p": 0.2},
    {"min_p": 1e-4, "top_p": 0.6},
    {"min_p": 0.01, "top_k": 500, "top_p": 0.999},
    {"top_k": 3000, "min_p": 1e-30},
]


def tokens_of(
    logits: Tensor, params: Sequence[SamplingParams | None], numbers: Sequence[float], vocab_size: int | None = None
) -> list[int]:
    """One call for all rows; None means greedy."""
    width = vocab_size or logits.shape[1]
    which, how = np.zeros((len(params), 4), np.int32), np.zeros((len(params), 4))
    for i, (row, number) in enumerate(zip(params, numbers, strict=True)):
        which[i, 0] = i
        if row is None:
            which[i, 1] = GREEDY
            continue
        which[i, 1] = row.top_k if row.top_k < width else 0
        depth = np.float32(row.temperature) * np.float32(math.log(row.min_p)) if row.min_p else -INF
        how[i] = 1 / row.temperature, depth, row.top_p, number
    tokens = torch.full((len(params),), -7, dtype=torch.int32, device=logits.device)
    on = logits.device
    choose(logits, width, torch.from_numpy(which).to(on), torch.from_numpy(how).to(on), tokens, gathered=True)
    return list(tokens.tolist())


def row_of(shape: str, width: int) -> Tensor:
    torch.manual_seed(3)
    logits = torch.randn(width) * 2
    if shape == "peaked":
        logits[torch.randint(width, (12,))] += torch.linspace(9, 14, 12)
        logits[-1] = 14.0  # in the last granule, which is not full
    elif shape == "ties":
        logits = logits.round()
    elif shape == "masked":
        logits[torch.rand(width) < 0.6] = -INF
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 256, 257, 4096, 9000])
def test_greedy_is_the_first_maximum(dtype: torch.dtype, width: int, device: str) -> None:
    logits = torch.randint(-5, 6, (5, width + 3)).to(dtype)  # few values, so many ties
    logits[:, width:] = NAN  # padding of the head
    want = np.argmax(logits[:, :width].float().numpy(), axis=1).tolist()
    assert greedy(logits.to(device), width).tolist() == want
    assert greedy(logits.to(device)[3:4], width).tolist() == want[3:4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_finite_maximum_have_no_token(dtype: torch.dtype, device: str) -> None:
    logits = torch.full((7, 700), -INF)
    logits[0, 5], logits[1, 699], logits[2, 3], logits[3, 650], logits[6, 400] = NAN, INF, -NAN, 0.0, -1e4
    logits[5] = NAN
    want = [-1, -1, -1, 650, -1, -1, 400]
    logits = logits.to(dtype).to(device)
    assert greedy(logits, 700).tolist() == want
    for row in (None, SamplingParams(), SamplingParams(top_k=3, top_p=0.5)):
        assert tokens_of(logits, [row] * 7, [0.5] * 7) == want


def test_zeros_of_either_sign_are_equal(device: str) -> None:
    logits = torch.full((1, 600), -1.0, device=device)
    logits[0, 300], logits[0, 500] = -0.0, 0.0
    assert greedy(logits, 600).tolist() == [300]
    assert tokens_of(logits, [SamplingParams(top_k=1)] * 1, [0.1]) == [300]
    assert tokens_of(logits, [SamplingParams(top_k=1)] * 1, [0.9]) == [500]


def test_no_rows(device: str) -> None:
    assert greedy(torch.empty(0, 50, device=device), 50).tolist() == []


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("flat", torch.bfloat16),
        ("flat", torch.float32),
        ("peaked", torch.bfloat16),
        ("ties", torch.float16),
        ("masked", torch.float32),
    ],
)
def test_a_draw_is_the_inverse_of_the_exact_distribution(shape: str, dtype: torch.dtype, device: str) -> None:
    width, numbers = 3_001, [0.011, 0.93]
    logits = row_of(shape, width).to(dtype)
    params = [SamplingParams(**chosen) for chosen in FILTERS for _ in numbers]
    padded = torch.full((len(params), width + 7), NAN, dtype=dtype)
    padded[:, :width] = logits
    got = tokens_of(padded.to(device), params, numbers * len(FILTERS), width)
    for i, (token, row) in enumerate(zip(got, params, strict=True)):
        share = exact(logits, row)
        want, number = share.cumsum(), numbers[i % len(numbers)]
        assert share[token] > 0, row
        assert want[token] - share[token] - 2e-5 <= number <= want[token] + 2e-5, row


def test_a_draw_is_that_of_the_cpu(device: str) -> None:
    """At numbers that are away from every boundary of the distribution, the very same token."""
    torch.manual_seed(5)
    for dtype in DTYPES:
        logits = (torch.randn(len(FILTERS), 9_500) * 3).to(dtype)
        params = [SamplingParams(**chosen) for chosen in FILTERS]
        numbers = []
        for row, chosen in zip(logits, params, strict=True):
            bounds = exact(row, chosen).cumsum()
            numbers.append(next(x for x in torch.rand(99).tolist() if np.abs(bounds - x).min() > 1e-5))
        assert tokens_of(logits.to(device), params, numbers) == draw(logits, params, numbers).tolist()


@pytest.mark.parametrize("room", [64, 1024])
def test_rows_with_too_many_candidates_are_read_as_a_whole(
    room: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.stack([row_of(shape, 3_001) for shape in ("flat", "peaked", "ties")] * 3).to(device)
    params = [SamplingParams(**FILTERS[i]) for i in (4, 6, 10) for _ in range(3)]
    numbers = [0.05 + 0.1 * i for i in range(9)]
    want = tokens_of(logits, params, numbers)
    monkeypatch.setattr(sampling, "CANDIDATES", room)
    assert tokens_of(logits, params, numbers) == want


def test_the_ends_of_the_unit_interval_give_tokens_that_have_weight(device: str) -> None:
    logits = torch.full((2, 2000), -INF, device=device)
    logits[:, [600, 601, 1400]] = torch.tensor([0.0, 1.0, -2.0], device=device)
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(min_p=1e-5), SamplingParams(top_p=0.999)):
        assert tokens_of(logits, [params] * 2, [0.0, LAST]) == [600, 1400]


def test_top_k_keeps_ties_with_its_last(device: str) -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 5.0, 1.0]).repeat(4, 200).to(device)
    numbers = [0.0, LAST, 0.0, LAST]
    params = [SamplingParams(top_k=1)] * 2 + [SamplingParams(top_k=201)] * 2
    assert tokens_of(logits, params, numbers) == [3, 998, 1, 999]


def test_a_row_draws_the_same_alone_and_in_any_company(device: str) -> None:
    torch.manual_seed(1)
    rows = [None, *(SamplingParams(**chosen) for chosen in FILTERS)]
    logits = (torch.randn(len(rows), 2_500) * 2).to(torch.bfloat16).to(device)
    numbers = [(i + 0.5) / len(rows) for i in range(len(rows))]
    together = tokens_of(logits, rows, numbers)
    assert tokens_of(logits.flip(0), rows[::-1], numbers[::-1]) == together[::-1]
    assert [tokens_of(logits[i : i + 1], [rows[i]], [numbers[i]])[0] for i in range(len(rows))] == together


@pytest.mark.parametrize("temperature", [1.1e-5, 1e30])
def test_extreme_temperatures(temperature: float, device: str) -> None:
    logits = torch.arange(1000.0).repeat(2, 1).to(device)
    want = [999, 999] if temperature < 1 else [100, 900]
    assert tokens_of(logits, [SamplingParams(temperature=temperature)] * 2, [0.1005, 0.9005]) == want
    filtered = SamplingParams(temperature=temperature, top_p=0.9999999)
    assert tokens_of(logits, [filtered] * 2, [0.1005, 0.9005]) == want
