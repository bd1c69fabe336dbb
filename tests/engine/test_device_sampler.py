"""The device's sampler gives what the CPU's gives, row for row, and does not wait for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isthmus.engine import device_sampler
from isthmus.engine.device_sampler import DeviceSampler, Drawn, score_later
from isthmus.engine.packing import Packer, _Staging
from isthmus.engine.sampler import Sampler, score
from isthmus.engine.step import Sampled, SampleRow
from isthmus.params import SamplingParams
from tests.engine.test_sampler import EOS, row

V = 777


class Mask:
    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self._allowed = allowed

    def prepare(self) -> None: ...

    def allowed(self) -> NDArray[np.bool_]:
        return self._allowed


def spelled(drawn: Drawn) -> list[Sampled]:
    """Its results, in full also where they are told by the token alone."""
    return [Sampled(result) if isinstance(result, int) else result for result in drawn.results()]


def assert_same(got: list[Sampled], want: list[Sampled]) -> None:
    assert [result.token_id for result in got] == [result.token_id for result in want]
    for one, other in zip(got, want, strict=True):
        assert (one.problem, one.rank) == (other.problem, other.rank)
        assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=2e-5))
        assert [entry.rank for entry in one.top] == [entry.rank for entry in other.top]
        assert [entry.token_id for entry in one.top] == [entry.token_id for entry in other.top]
        assert [entry.logprob for entry in one.top] == pytest.approx([e.logprob for e in other.top], abs=2e-5)


def some_row(rng: np.random.Generator) -> SampleRow:
    """Any combination of everything a row can ask for."""

    def maybe(value: Any, off: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else off

    def tokens(n: int) -> list[int]:
        return [*map(int, rng.integers(0, V, n)), 1, 1, 2]

    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.3, 2))),
        top_k=maybe(int(rng.integers(1, 800)), 0),
        top_p=maybe(float(rng.uniform(0.1, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 0.3)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({int(t): float(rng.uniform(-9, 9)) for t in (1, EOS, rng.integers(0, V))}, {}),
        stop_token_ids=maybe([5, 2, V + 4], []),
        logprobs=maybe(int(rng.choice([0, 5])), None),
    )
    return row(
        params, seed=int(rng.integers(0, 9)), position=int(rng.integers(0, 99)), prompt=tokens(9), output=tokens(6),
        allow_eos=bool(rng.random() < 0.7), mask=maybe(Mask(rng.random(V) < 0.5), None),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestAsTheCpu:
    def test_any_rows_together(self, dtype: torch.dtype, device: str) -> None:
        rng = np.random.default_rng(7)
        torch.manual_seed(7)
        rows = [some_row(rng) for _ in range(50)]
        logits = torch.randn(50, V + 3) * 3  # 3 columns are padding of the head
        logits[:, V:] = math.nan
        logits[:, [1, 2, 5, EOS]] += 6.0
        logits = logits + torch.arange(V + 3) * 1e-6  # no ties, whose order in `top` is nobody's promise
        if dtype == torch.bfloat16:  # there are: look at the tokens alone
            rows = [dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=None)) for r in rows]
        logits = logits.to(dtype)
        before = logits.clone()
        sampler = DeviceSampler([EOS], V, device)
        on_device = logits.to(device)
        drawn = sampler(on_device, rows)
        results = spelled(drawn)
        assert_same(results, Sampler([EOS], V)(logits, rows))
        assert drawn.tokens.dtype == torch.int32
        assert drawn.tokens.tolist() == [result.token_id for result in results]
        assert torch.equal(on_device.cpu().nan_to_num(99.0), before.nan_to_num(99.0))

    def test_broken_rows_have_a_problem_and_the_others_their_tokens(self, dtype: torch.dtype, device: str) -> None:
        logits = torch.randn(12, V).to(dtype)
        logits[:, 3:9] = torch.arange(10, 16).to(dtype) / 2  # the highest: no ties, whose order is nobody's promise
        for i, bad in enumerate([math.nan, math.inf, -math.nan]):
            logits[4 * i + 1, 700] = bad
        logits[11] = -math.inf
        kinds = [SamplingParams(temperature=0), SamplingParams(top_k=4, top_p=0.5), SamplingParams(presence_penalty=1)]
        rows = [
            row(dataclasses.replace(kinds[i % 3], logprobs=i % 2 * 2), seed=i, position=1, output=[9])
            for i in range(12)
        ]
        got = spelled(DeviceSampler([EOS], V, device)(logits.to(device), rows))
        assert [i for i, result in enumerate(got) if result.problem] == [1, 5, 9, 11]
        assert_same(got, Sampler([EOS], V)(logits, rows))

    @pytest.mark.parametrize("width", [2, 255, 1024])
    def test_one_row_of_any_width(self, width: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        logits = torch.randn(1, width).to(dtype)
        sampler, cpu = DeviceSampler([], width, device), Sampler([], width)
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(),
            SamplingParams(top_k=1),
            SamplingParams(top_p=0.7, min_p=0.01, logit_bias={1: 1.0}),
        ):
            one = [row(params, seed=4, position=2)]
            assert_same(spelled(sampler(logits.to(device), one)), cpu(logits, one))


class TestEdits:
    def test_a_masked_token_cannot_come_whatever_its_logit(self, device: str) -> None:
        logits = torch.zeros(3, V)
        logits[:, [4, 776]] = torch.tensor([9.0, 8.0])
        logits[0, 4], logits[1, EOS] = math.nan, math.inf
        only = Mask(np.arange(V) % 8 == 0)
        rows = [row(mask=only), row(allow_eos=False), row(mask=only, allow_eos=False)]
        assert [r.token_id for r in spelled(DeviceSampler([EOS], V, device)(logits.to(device), rows))] == [776, 4, 776]

    def test_rows_are_edited_some_at_a_time(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(1)
        torch.manual_seed(1)
        rows = [dataclasses.replace(some_row(rng), allow_eos=i % 4 == 0) for i in range(13)]
        logits = torch.randn(13, V) * 3
        logits[:, [1, 2, 5, EOS]] += 6.0
        monkeypatch.setattr(device_sampler, "_EDITED_BYTES", 3 * 4 * V)
        got = spelled(DeviceSampler([EOS], V, device)(logits.to(device), rows))
        assert_same(got, Sampler([EOS], V)(logits, rows))

    def test_a_token_that_the_vocabulary_lacks_is_an_error_not_a_write(self, device: str) -> None:
        sampler, logits = DeviceSampler([EOS], V, device), torch.zeros(1, V, device=device)
        for wrong in (
            row(SamplingParams(logit_bias={V: 1.0})),
            row(SamplingParams(repetition_penalty=2), prompt=[-1]),
            row(SamplingParams(presence_penalty=1), output=[V + 1]),
        ):
            with pytest.raises(IndexError, match="not in the vocabulary"):
                sampler(logits, [wrong])
        with pytest.raises(IndexError, match="not in the vocabulary"):
            score_later(logits, [V], [0])


class TestScores:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_scores_are_those_of_the_cpu(self, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(2)
        order = torch.rand(6, 300).argsort(-1)
        logits = ((order - 150) / 16).to(dtype)  # exact in bfloat16, and no ties
        targets, wanted = [0, 299, 7, 7, 100, 3], [0, 5, 1, 300, 0, 999]
        head = torch.zeros(6, 304, dtype=dtype)  # rows of a wider head
        head[:, :300] = logits
        want = score(logits, targets, [*wanted[:-1], 300])
        assert_same(score_later(head.to(device)[:, :300], targets, wanted).results(), want)
        on_device = torch.tensor(targets, dtype=torch.int32, device=device)
        assert_same(score_later(logits.to(device), on_device, wanted).results(), want)

    def test_scores_of_no_rows(self, device: str) -> None:
        assert score_later(torch.empty(0, V, device=device), [], []).results() == []


class TestQueue:
    def test_no_rows(self, device: str) -> None:
        drawn = DeviceSampler([EOS], V, device)(torch.empty(0, V, device=device), [])
        assert (drawn.tokens.tolist(), list(drawn.results())) == ([], [])

    def test_greedy_rows_upload_nothing(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("uploaded")

        monkeypatch.setattr(Packer, "upload", refuse)
        logits = torch.eye(4, V, device=device)
        drawn = DeviceSampler([EOS], V, device)(logits, [row()] * 4)
        assert [result.token_id for result in spelled(drawn)] == [0, 1, 2, 3]
        with pytest.raises(AssertionError, match="uploaded"):
            DeviceSampler([EOS], V, device)(logits, [row(SamplingParams())] * 4)

    def test_results_are_of_the_time_of_the_call(self, device: str) -> None:
        """A graph's output buffer is written again before anybody reads the results."""
        tokens = torch.tensor([5, -1, 7], dtype=torch.int32, device=device)
        drawn = DeviceSampler([EOS], V, device).chosen(tokens)
        tokens.fill_(0)
        results = spelled(drawn)
        assert [result.token_id for result in results] == [5, -1, 7]
        assert results[1].problem is not None

    def test_lanes_that_pad_a_graph_are_nobodys(self, device: str) -> None:
        """Whatever is in them."""
        tokens = torch.tensor([5, 7, -1, 9], dtype=torch.int32, device=device)
        results = DeviceSampler([EOS], V, device).chosen(tokens, 2).results()
        assert (results.ids.tolist(), len(results), results.more) == ([5, 7], 2, {})

    def test_results_outlive_the_memory_they_came_in(self, device: str) -> None:
        """It is used again, once somebody has waited for what was there; by steps of any size."""
        sampler, told = DeviceSampler([EOS], V, device), []
        out: list[Drawn] = []
        for step, n in enumerate((3, 1, 300, 2, 400, 4, 7)):
            out.append(sampler.chosen(torch.full((n,), step, dtype=torch.int32, device=device)))
            if len(out) == 2:
                told.append(out.pop(0).results())
        told.append(out.pop().results())
        assert [results.ids.tolist() for results in told] == [
            [0] * 3,
            [1],
            [2] * 300,
            [3] * 2,
            [4] * 400,
            [5] * 4,
            [6] * 7,
        ]
        assert len(sampler._spare) == 2, "as many as were out at a time"

    def test_a_step_does_not_wait_for_the_uploads_of_the_one_before(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which stand behind that one's forward."""
        acquired: list[int] = []
        acquire = _Staging.acquire

        def noted(staging: _Staging, nbytes: int) -> None:
            acquired.append(id(staging))
            acquire(staging, nbytes)

        monkeypatch.setattr(_Staging, "acquire", noted)
        sampler, logits = DeviceSampler([EOS], V, device), torch.randn(2, V, device=device)
        rows = [row(SamplingParams(logprobs=2)), row(SamplingParams())]
        for _ in range(2):
            sampler(logits, rows)
        assert len(acquired) == len(set(acquired)) == 4

    def test_unseeded_rows_differ(self, device: str) -> None:
        sampler, rows = DeviceSampler([EOS], V, device), [row(SamplingParams())] * 12
        first, second = (sampler(torch.zeros(12, V, device=device), rows).tokens.tolist() for _ in range(2))
        assert len({*first, *second}) > 12


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    rng = np.random.default_rng(0)
    sampler, logits = DeviceSampler([EOS], V, "cuda"), torch.randn(64, V, device="cuda", dtype=torch.bfloat16)
    rows = [some_row(rng) for _ in range(64)]
    sampler(logits, rows).results()  # compiles
    score_later(logits, [1] * 64, [3] * 64).results()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed, greedy = sampler(logits, rows), sampler(logits, [row()] * 64)
        scored = score_later(logits, [1] * 64, [3] * 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(mixed.results()) == len(greedy.results()) == len(scored.results()) == 64
