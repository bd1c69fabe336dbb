"""Experts' products against one product after the other. Without a GPU through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.kernels import experts
from isthmus.kernels.experts import Config, Work, config_of, expert_linear, most_tiles, sort_pairs, work_size

ROUTINGS: dict[str, Callable[[int, int], np.ndarray]] = {
    "even": lambda pairs, n: np.arange(pairs) % n,
    "one expert": lambda pairs, n: np.full(pairs, n - 1),
    "drawn": lambda pairs, n: np.random.default_rng(pairs).integers(0, n, pairs),
    "some": lambda pairs, n: np.random.default_rng(pairs).choice([0, n // 2], pairs),
}


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("pairs", "number", "block"), [(1, 4, 16), (6, 3, 16), (300, 7, 16), (300, 40, 64)])
def test_every_pair_is_in_one_tile_of_its_expert(
    device: str, monkeypatch: pytest.MonkeyPatch, routing: str, pairs: int, number: int, block: int, few: bool
) -> None:
    monkeypatch.setattr(experts, "_FEW", 4096 if few else 0)
    monkeypatch.setattr(experts, "_SORTED", 64)
    expert_of = ROUTINGS[routing](pairs, number)
    work = sort_pairs(torch.from_numpy(expert_of).to(device), number, block, early=True)
    assert len(work) == work_size(pairs, number)
    order, tiles, _ = (part.cpu().numpy() for part in Work.of(work, pairs, number, block))
    assert len(tiles) == most_tiles(pairs, number, block)
    live = tiles[tiles[:, 0] >= 0]
    assert (np.diff(live[:, 0]) >= 0).all(), "an expert's tiles stand together, so that its weight is read while near"
    assert live[0, 1] == 0
    assert live[-1, 2] == pairs
    assert (live[1:, 1] == live[:-1, 2]).all()
    for expert, start, end in live:
        assert 0 < end - start <= block
        assert (expert_of[order[start:end]] == expert).all()
    assert sorted(order) == list(range(pairs))


def layer(device: str, dtype: torch.dtype, transposed: bool, bias: bool) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(5, 70, 40, device=device).to(dtype)
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    return stored, torch.randn(5, 70, device=device).to(dtype) if bias else None


@pytest.mark.parametrize("built", [None, Config(32, 32, 16, 4, 2), Config(128, 16, 64, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("transposed", "bias"), [(False, False), (True, True)])
def test_products(device: str, dtype: torch.dtype, transposed: bool, bias: bool, built: Config | None) -> None:
    """From rows by token and from rows by pair, which lie apart and are NaN behind their ends."""
    torch.manual_seed(0)
    tokens, top_k, number = 23, 3, 5
    weight, offset = layer(device, dtype, transposed, bias)
    chosen = torch.stack([torch.randperm(number)[:top_k] for _ in range(tokens)]).to(device)
    expert_of = chosen.reshape(-1)
    built = built or config_of(len(expert_of), number, weight.itemsize)
    work = sort_pairs(expert_of, number, built.block_m, early=True)
    for share in (top_k, 1):
        rows = torch.full((len(expert_of) // share, 48), float("nan"), device=device, dtype=dtype)
        rows[:, :40] = torch.randn(len(rows), 40, device=device)
        x = rows[:, :40]
        out = expert_linear(x, work, weight, offset, top_k=share, transposed=transposed, config=built, early=True)
        assert out.dtype is dtype
        own = weight.transpose(1, 2) if transposed else weight
        expected = torch.einsum("pnk,pk->pn", own[expert_of].double(), x.repeat_interleave(share, 0).double())
        if offset is not None:
            expected += offset[expert_of].double()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 4)


def test_a_row_is_the_same_wherever_its_pair_stands(device: str) -> None:
    """Which is why pairs need no order within an expert: bit for bit."""
    torch.manual_seed(0)
    weight = torch.randn(2, 32, 40, device=device).to(torch.bfloat16)
    x = torch.randn(40, 40, device=device).to(torch.bfloat16)
    expert_of = torch.zeros(40, dtype=torch.int64, device=device)
    built = Config(16, 16, 16, 4, 2)
    there = expert_linear(x, sort_pairs(expert_of, 2, 16, early=True), weight, None, top_k=1, config=built, early=True)
    turned = expert_linear(
        x.flip(0).contiguous(),
        sort_pairs(expert_of, 2, 16, early=True),
        weight,
        None,
        top_k=1,
        config=built,
        early=True,
    )
    assert torch.equal(there, turned.flip(0))


def test_no_tokens(device: str) -> None:
    weight = torch.randn(2, 32, 40, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    out = expert_linear(weight.new_empty(0, 40), sort_pairs(none, 2, 16, early=True), weight, None, top_k=2, early=True)
    assert out.shape == (0, 32)
