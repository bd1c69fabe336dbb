"""Attention over pages of fp8: every number of it, and queries and weights that fp16 by itself would not hold."""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.attention_world import FP8 as SHAPE
from tests.kernels.attention_world import Shape, World, close, cut, decode, dense, prefill, scoring, world
from torch import Tensor

from isthmus.kernels.attention import FP8
from isthmus.kernels.attention_softmax import numbers
from isthmus.kernels.reference import Scoring


@triton.jit
def _split(p_words: tl.tensor, p_to: tl.tensor, FORMAT: tl.constexpr, N: tl.constexpr) -> None:
    o_word = tl.program_id(0) * N + tl.arange(0, N)
    b_first, b_second = numbers(tl.load(p_words + o_word), FORMAT, p_to.dtype.element_ty)
    tl.store(p_to + o_word * 2, b_first)
    tl.store(p_to + o_word * 2 + 1, b_second)


@pytest.mark.parametrize("wide", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", FP8)
def test_every_pair_of_numbers_is_read_as_torch_reads_it(device: str, dtype: torch.dtype, wide: torch.dtype) -> None:
    """What is none, too: NaN where memory is poisoned must come out as NaN."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    found = torch.empty(2 << 16, dtype=wide, device=device)
    _split[(64,)](words.to(device), found, FORMAT=FP8[dtype], N=1024)
    expected = words.view(dtype).to(torch.float32)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Run:
    """A kernel, and the new tokens of two sequences for it."""

    attend: Callable[[World, Scoring], Tensor]
    counts: tuple[int, int]


RUNS = {
    "decode": Run(lambda at, how: decode(at, how, 8), (1, 1)),
    "prefill": Run(prefill, (3, 20)),
    "prefill in parts": Run(lambda at, how: prefill(at, how, tiles=cut(at)), (3, 20)),
}
runs = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())


def written(run: Run, device: str, shape: Shape = SHAPE) -> World:
    at = world(device, shape, run.counts, [60, 200])
    at.write()
    return at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pages", FP8)
@pytest.mark.parametrize("dims", [(32, 64), (40, 40), (64, 32), (16, 16)])
def test_types_and_sizes(device: str, dims: tuple[int, int], pages: torch.dtype, dtype: torch.dtype) -> None:
    """Of decodes: prefill's tiles with rows as short as some of these are what `delta_chunks` says of narrow ones."""
    at = written(RUNS["decode"], device, replace(SHAPE, k_dim=dims[0], v_dim=dims[1], dtype=dtype, pages=pages))
    how = scoring(at, softcap=3.0, sinks=True)
    close(RUNS["decode"].attend(at, how), dense(at, how), dtype)


@runs
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("power", [-110, -20, 0, 20, 110])
def test_queries_may_be_of_any_size(device: str, power: int, softcap: float | None, run: Run) -> None:
    """fp16 ends at 65,504 and begins at 6e-8: each row is brought near 1, a row of zeros stays one."""
    at = written(run, device)
    plain = scoring(at, softcap=softcap)
    at.query[0, 0] = 0
    at.query[1, 1] *= 2.0**9  # beside rows that are not
    wanted = dense(at, plain)
    at.query *= 2.0**power
    close(run.attend(at, replace(plain, scaling=plain.scaling * 2.0**-power)), wanted, torch.bfloat16)


@runs
@pytest.mark.parametrize("element", [6, 7])
def test_one_number_may_be_far_above_the_others_of_its_row(device: str, element: int, run: Run) -> None:
    """At an even place, and at an odd one."""
    at = written(run, device)
    at.query[1, :, element] = 2.0**17
    how = replace(scoring(at), scaling=2.0**-17)
    close(run.attend(at, how), dense(at, how), torch.bfloat16)


@runs
def test_a_query_of_nan_stays_in_its_row(device: str, run: Run) -> None:
    at = written(run, device)
    wanted = dense(at, scoring(at))
    at.query[1, 2, 5] = torch.nan
    found = run.attend(at, scoring(at))
    assert found[1, 2].isnan().all()
    found[1, 2] = wanted[1, 2] = 0
    close(found, wanted, torch.bfloat16)


@runs
def test_many_small_weights_count(device: str, run: Run) -> None:
    """Each is 4e-8 of the largest, less than fp16 knows: together they are all that is there to see."""
    new = run.counts[0]
    whole = world(device, SHAPE, [2000 + new], [0])
    whole.query.fill_(1)
    whole.keys[0].zero_()
    whole.keys[0][7] = 2
    whole.values[0].fill_(448)
    whole.values[0][7] = 0
    whole.write()
    at = replace(whole, counts=np.array([new]), past=np.array([2000]), query=whole.query[2000:])
    how = replace(scoring(at), scaling=17 / (2 * SHAPE.k_dim))
    found, wanted = run.attend(at, how).double(), dense(at, how)
    assert 0.03 < wanted.min() <= wanted.max() < 0.05
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)
