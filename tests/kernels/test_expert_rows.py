"""Experts of few pairs against one product after the other. Without a GPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from isthmus.kernels.expert_rows import are_few, expert_rows
from isthmus.kernels.linear_row import RowConfig


@pytest.mark.parametrize("built", [None, RowConfig(2, 32, 4, 1, 1), RowConfig(16, 16, 4, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "share"), [(1, 3), (2, 3), (5, 1)])
def test_products(
    device: str, tokens: int, share: int, bias: bool, dtype: torch.dtype, built: RowConfig | None
) -> None:
    """Rows lie apart and are NaN behind their ends, as experts are that nobody has chosen."""
    torch.manual_seed(0)
    expert_of = torch.tensor([4, 0, 2, 2, 0, 4], device=device)[: tokens * share]
    weight, offset = torch.randn(6, 70, 40, device=device).to(dtype), torch.randn(6, 70, device=device).to(dtype)
    weight[[1, 3, 5]] = offset[[1, 3, 5]] = torch.nan
    rows = torch.full((tokens, 48), torch.nan, device=device, dtype=dtype)
    rows[:, :40] = torch.randn(tokens, 40, device=device)
    x = rows[:, :40]
    out = expert_rows(x, expert_of, weight, offset if bias else None, top_k=share, config=built, early=True)
    expected = torch.einsum("pnk,pk->pn", weight[expert_of].double(), x.repeat_interleave(share, 0).double())
    if bias:
        expected += offset[expert_of].double()
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=8e-3, atol=3e-2)


def test_no_tokens(device: str) -> None:
    weight = torch.randn(2, 32, 40, device=device).bfloat16()
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert expert_rows(weight.new_empty(0, 40), none, weight, None, top_k=2, early=True).shape == (0, 32)


def test_whom_it_is_for() -> None:
    assert are_few(16, 64, 2, transposed=False)
    assert not are_few(17, 512, 2, transposed=False)
    assert not are_few(16, 63, 2, transposed=False), "some have an expert in common"
    assert not are_few(8, 64, 4, transposed=False), "float32 is what is compared with Transformers"
    assert not are_few(8, 64, 2, transposed=True)
