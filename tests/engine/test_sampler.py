"""Each parameter does to the distribution what its definition says; seeds hold in any company."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.engine.draw import draw, first_maximum
from isthmus.engine.sampler import Sampler, uniform
from isthmus.engine.step import SampleRow
from isthmus.params import SamplingParams

EOS = 3


def row(params: SamplingParams | None = None, **changes: Any) -> SampleRow:
    plain = SampleRow(
        row=0, index=0, params=params or SamplingParams(temperature=0), seed=None, position=0,
        prompt=[], output=[], allow_eos=True,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def sample(logits: torch.Tensor, *rows: SampleRow, vocab_size: int | None = None) -> list[int]:
    sampler = Sampler([EOS], vocab_size or logits.shape[1])
    return [result.token_id for result in sampler(logits, rows)]


def support(params: SamplingParams, logits: list[float]) -> dict[int, float]:
    """Frequencies over a fine grid of uniform numbers: the exact distribution up to the grid."""
    n = 2000
    rows = torch.tensor(logits).repeat(n, 1)
    tokens = draw(rows, [params] * n, [(i + 0.5) / n for i in range(n)]).tolist()
    return {token: tokens.count(token) / n for token in sorted(set(tokens))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 512, 513, 3000])
def test_greedy_is_the_first_maximum_in_every_dtype(dtype: torch.dtype, width: int) -> None:
    logits = torch.randint(-5, 6, (9, width)).to(dtype)  # few values, so many ties
    assert first_maximum(logits).tolist() == np.argmax(logits.float().numpy(), axis=1).tolist()
    assert sample(logits, *[row()] * 9) == np.argmax(logits.float().numpy(), axis=1).tolist()


SAMPLERS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=4, top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.1, presence_penalty=1),
]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", SAMPLERS)
def test_a_row_without_a_finite_maximum_has_a_problem_and_the_others_their_tokens(
    bad: float, params: SamplingParams
) -> None:
    logits = torch.zeros(3, 1000)
    logits[:, 5] = 300.0
    logits[1, 700] = bad
    rows = [row(dataclasses.replace(params, logprobs=1), output=[9])] * 3
    first, broken, last = Sampler([EOS], 1000)(logits, rows)
    assert [first.token_id, last.token_id] == [5, 5]
    assert (first.problem, last.problem) == (None, None)
    assert broken.problem is not None
    assert "--dtype" in broken.problem
    assert broken.logprob is None


def test_padding_of_the_head_is_never_chosen_and_logits_stay_as_they_were() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0]])
    before = logits.clone()
    hot = row(SamplingParams(temperature=2.0, frequency_penalty=1, logprobs=1), output=[1])
    assert sample(logits, row(), vocab_size=3) == [1]
    assert sample(logits, hot, vocab_size=3)[0] < 3
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(temperature=2.0, seed=1)]
)
def test_frequencies_follow_the_softmax_at_the_temperature(params: SamplingParams) -> None:
    logits = [0.0, 1.0, -1.0, 0.5]
    want = torch.softmax(torch.tensor(logits) / params.temperature, -1)
    assert support(params, logits) == {i: pytest.approx(float(p), abs=2e-3) for i, p in enumerate(want)}


def test_draws_over_many_blocks_follow_the_softmax() -> None:
    torch.manual_seed(0)
    logits, n = torch.randn(1700) * 2, 60_000
    numbers = [(i + 0.5) / n for i in range(n)]
    counts = torch.zeros(1700)
    for start in range(0, n, 2000):
        part = numbers[start : start + 2000]
        counts += torch.bincount(draw(logits.repeat(2000, 1), [SamplingParams()] * 2000, part), minlength=1700)
    assert torch.allclose(counts / n, torch.softmax(logits, -1), atol=2e-5 + 1 / n)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=100), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.5), {0, 1}),  # 0.4 + 0.3
        (SamplingParams(top_p=0.39), {0}),
        (SamplingParams(top_p=0.71), {0, 1, 2}),
        (SamplingParams(top_p=0.9999), {0, 1, 2, 3, 4}),
        (SamplingParams(min_p=0.5), {0, 1, 2}),  # 0.2 >= 0.5 * 0.4
        (SamplingParams(min_p=0.9), {0}),
        (SamplingParams(top_k=2, top_p=0.5), {0}),  # 0.4 / 0.7 is over half already
        (SamplingParams(min_p=0.7, top_p=0.5), {0}),
        (SamplingParams(top_k=1, temperature=5.0), {0}),
    ],
)
def test_filters_keep_what_they_define(params: SamplingParams, kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2001, 0.07, 0.0299)]
    got = support(params, logits)
    assert set(got) == kept
    total = sum(math.exp(logits[i] / params.temperature) for i in kept)
    assert got == {i: pytest.approx(math.exp(logits[i] / params.temperature) / total, abs=2e-3) for i in kept}


def test_top_p_of_a_flat_row_keeps_its_share_of_thousands() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 5000) * 0.1
    ranked = torch.softmax(logits[0].double(), -1).sort(descending=True)
    keep = set(ranked.indices[: int((ranked.values.cumsum(-1) < 0.6).sum()) + 1].tolist())
    n = 4000
    tokens = draw(logits.repeat(n, 1), [SamplingParams(top_p=0.6)] * n, [(i + 0.5) / n for i in range(n)])
    assert set(tokens.tolist()) <= keep
    assert len(set(tokens.tolist())) > 0.7 * len(keep)


def exact(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by the definitions, in float64 and with everything sorted."""
    x = logits.double().numpy() / params.temperature
    keep = np.ones(len(x), bool)
    if params.min_p:
        keep &= x >= x.max() + math.log(params.min_p)
    if params.top_k:
        keep &= x >= np.sort(x)[-min(params.top_k, len(x))]
    weights = np.where(keep, np.exp(x - x.max()), 0.0)
    order = np.argsort(-x, kind="stable")
    order = order[keep[order]]
    mass = np.cumsum(weights[order]) / weights.sum()
    last = x[order[np.searchsorted(mass, params.top_p)]] if params.top_p < 1 else -math.inf
    weights[x < last] = 0.0
    share: np.ndarray = weights / weights.sum()
    return share


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 30},
    {"top_k": 30, "top_p": 0.8},
    {"top_k": 9000, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 1e-4, "top_p": 0.6},
    {"min_p": 0.01, "top_k": 500, "top_p": 0.999},
    {"top_k": 10**30},
]


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("shape", ["flat", "peaked", "ties", "far below"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_the_inverse_of_the_exact_distribution(
    params: dict[str, Any], shape: str, dtype: torch.dtype
) -> None:
    """In token order, over many blocks: whichever way the sampler finds what a row keeps."""
    torch.manual_seed(3)
    logits = torch.randn(20_011)
    if shape == "peaked":
        logits[torch.randint(20_011, (12,))] += torch.linspace(9, 14, 12)
        logits[-1] = 14.0  # in the last block, which is not full
    elif shape == "ties":
        logits = logits.round()
    elif shape == "far below":
        logits[777], logits[1234] = 40.0, 39.0
    logits, chosen = logits.to(dtype), SamplingParams(**params)
    want, n = exact(logits, chosen).cumsum(), 41
    numbers = [(i + 0.5) / n for i in range(n)]
    tokens = draw(logits.expand(n, -1), [chosen] * n, numbers).tolist()
    for token, number in zip(tokens, numbers, strict=True):
        assert want[token - 1] - 3e-5 <= number <= want[token] + 3e-5  # the cumulative distribution passes it there


def test_the_ends_of_the_unit_interval_give_tokens_that_have_weight() -> None:
    logits = torch.full((2, 2000), -math.inf)
    logits[:, [600, 601, 1400]] = torch.tensor([0.0, 1.0, -2.0])
    assert draw(logits, [SamplingParams()] * 2, [0.0, 1 - 2**-53]).tolist() == [600, 1400]


def test_repetition_penalty_counts_prompt_and_output_the_others_output_alone() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -9.0]])
    repeat = SamplingParams(temperature=0, repetition_penalty=4.0)
    assert sample(logits, row(repeat, prompt=[0])) == [1]
    assert sample(logits, row(repeat, prompt=[0], output=[1])) == [0]
    assert sample(torch.tensor([[-1.0, -3.0, -9.0, -9.0]]), row(repeat, prompt=[0])) == [1]  # negative: multiplied
    presence = SamplingParams(temperature=0, presence_penalty=0.5)
    assert sample(logits, row(presence, prompt=[0])) == [0]
    assert sample(logits, row(presence, output=[0])) == [1]
    frequency = SamplingParams(temperature=0, frequency_penalty=0.06)
    assert sample(logits, row(frequency, output=[0])) == [0]
    assert sample(logits, row(frequency, output=[0, 0])) == [1]


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert sample(logits, row(SamplingParams(temperature=0, logit_bias={0: 10.0}))) == [0]
    assert sample(logits, row()) == [EOS]
    held = row(SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[2]), allow_eos=False)
    assert sample(logits, held) == [1]


def test_a_seeded_row_draws_the_same_alone_and_in_any_company() -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, 4000) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 7, "top_p": 0.5},
        {"top_p": 0.99},
        {"top_k": 3000, "top_p": 0.8},
        {"min_p": 1e-9},
    ]
    rows = [row(SamplingParams(seed=i, **kind), seed=i, position=11) for i, kind in enumerate(kinds)]
    alone = [sample(logits[i : i + 1], r)[0] for i, r in enumerate(rows)]
    assert sample(logits, *rows) == alone
    assert sample(logits.flip(0), *rows[::-1]) == alone[::-1]
    mixed = torch.cat([torch.randn(2, 4000), logits])
    assert sample(mixed, row(), row(SamplingParams(temperature=3)), *rows)[2:] == alone


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else_of_the_row() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 4000).repeat(40, 1)
    params = SamplingParams()
    same = [row(params, seed=5, position=9, row=i, index=i) for i in range(40)]
    assert len(set(sample(logits, *same))) == 1
    assert len(set(sample(logits, *[row(params, seed=5, position=i) for i in range(40)]))) > 20
    assert len(set(sample(logits, *[row(params, seed=i, position=9) for i in range(40)]))) > 20


def test_numbers_differ_by_seed_and_position_and_unseeded_rows_differ_by_draw() -> None:
    numbers = {uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) == 900
    assert 0.45 < sum(numbers) / 900 < 0.55
    flat = torch.zeros(64, 1000)
    assert len(set(sample(flat, *[row(SamplingParams())] * 64))) > 30


def test_logprobs_are_of_the_raw_logits_with_ranks() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]] * 3)
    params = SamplingParams(temperature=0, logit_bias={2: 50.0}, logprobs=3)
    want = torch.log_softmax(logits[0], -1)
    biased, plain, none = Sampler([], 4)(logits, [row(params), row(SamplingParams(temperature=0, logprobs=0)), row()])
    assert (biased.token_id, biased.rank) == (2, 3)
    assert biased.logprob == pytest.approx(float(want[2]))
    assert [(entry.token_id, entry.rank) for entry in biased.top] == [(1, 1), (3, 2), (2, 3)]
    assert [entry.logprob for entry in biased.top] == pytest.approx(want[[1, 3, 2]].tolist())
    assert (plain.token_id, plain.rank, plain.top) == (1, 1, ())
    assert (none.logprob, none.rank, none.top) == (None, None, ())


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.tensor([[1.0, 1.0001, 0.0, 0.0]])
    assert sample(logits, row(SamplingParams(temperature=1e-7))) == [1]
