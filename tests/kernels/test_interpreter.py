"""What `tests.interpreter` mends in Triton's interpreter, and would be missed if a new Triton undid it."""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@triton.jit
def _convert(p_from: tl.tensor, p_to: tl.tensor, N: tl.constexpr) -> None:
    o = tl.arange(0, N)
    tl.store(p_to + o, tl.load(p_from + o).to(tl.float32).to(p_to.dtype.element_ty))


@triton.jit
def _through(p_from: tl.tensor, p_to: tl.tensor, DTYPE: tl.constexpr, N: tl.constexpr) -> None:
    o = tl.arange(0, N)
    tl.store(p_to + o, tl.load(p_from + o).to(DTYPE).to(p_to.dtype.element_ty))


@triton.jit
def _double(p_x: tl.tensor, N: tl.constexpr) -> None:
    b_x = tl.load(p_x + tl.arange(0, N))
    tl.store(p_x + tl.arange(0, N), b_x + b_x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_are_rounded_and_widened_as_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = torch.cat((torch.randn(62), torch.tensor([float("nan"), 1e-3])))
    narrow, wide = torch.empty(64, dtype=dtype), torch.empty(64)
    _convert[(1,)](numbers, narrow, N=64)
    _convert[(1,)](narrow, wide, N=64)
    torch.testing.assert_close(wide, numbers.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    every, half = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype), torch.empty(256, dtype=torch.half)
    _through[(1,)](every, half, DTYPE=tl.float16, N=256)
    torch.testing.assert_close(half, every.half(), rtol=0, atol=0, equal_nan=True)


def test_whole_numbers_are_no_bits() -> None:
    given, found = torch.tensor([0, 1, -3, 77] * 4, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    _through[(1,)](given, found, DTYPE=tl.bfloat16, N=16)
    assert torch.equal(found, given)
    _through[(1,)](given > 0, found, DTYPE=tl.bfloat16, N=16)
    assert torch.equal(found, (given > 0).int())
    narrow = torch.empty(16, dtype=torch.bfloat16)
    _through[(1,)](given, narrow, DTYPE=tl.int64, N=16)
    assert torch.equal(narrow.int(), given)


def test_nobody_computes_with_bits() -> None:
    with pytest.raises(InterpreterError, match="must be made wider"):
        _double[(1,)](torch.ones(16, dtype=torch.bfloat16), N=16)
