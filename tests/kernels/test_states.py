"""How a step's tokens are cut, how states are read and put back, and the convolution that keeps its last inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.serving import CUTS, LENGTHS, Cut, States, sequences, serve
from torch.nn import functional

from isthmus.kernels.states import StateStep, causal_conv, state_view
from isthmus.memory import Group, state_spec


def step_of(counts: list[int], past: list[int] | None = None, pages: list[int] | None = None) -> StateStep:
    """Of sequences that go on, in pages 1, 2, 3 ... if not said otherwise."""
    count = len(counts)
    return StateStep.of(
        np.cumsum([0, *counts]),
        np.array([5] * count if past is None else past),
        np.array(range(1, count + 1) if pages is None else pages),
    )


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_a_grid_has_every_token_of_every_chunk_once_and_no_other(size: int) -> None:
    counts = [1, 4, 9, 1, 2, 8]
    step = step_of(counts)
    grid = step.grid(size)
    assert grid.sequences.tolist() == [1, 2, 4, 5]
    real = grid.tokens[~grid.padding].tolist()
    assert sorted(real) == [t for t in range(25) if t not in (0, 14)]
    assert len(set(real)) == len(real)
    for k, (chunks, members) in enumerate(grid.ranks):
        assert members.tolist() == sorted(set(members.tolist())), "a sequence has one k-th chunk"
        for chunk, member in zip(chunks.tolist(), members.tolist(), strict=True):
            assert grid.member[chunk] == member
            s = int(grid.sequences[member])
            first = int(step.query_start[s]) + k * size
            tokens = list(range(first, min(first + size, int(step.query_start[s + 1]))))
            assert grid.tokens[chunk].tolist() == tokens + [first] * (size - len(tokens)), (
                "padding is of the same chunk"
            )
            assert grid.padding[chunk].tolist() == [False] * len(tokens) + [True] * (size - len(tokens))
    assert sum(len(chunks) for chunks, _ in grid.ranks) == len(grid.tokens) == sum(-(-n // size) for n in (4, 9, 2, 8))


def test_a_grid_of_nothing_but_decodes_is_empty() -> None:
    step = step_of([1, 1])
    assert step.only_decodes
    assert step.grid(4).ranks == ()
    assert step.grid(4).tokens.shape == (0, 4)
    assert not step_of([1, 2]).only_decodes


def test_what_depends_on_the_step_alone_is_made_once() -> None:
    step = step_of([3, 1])
    assert step.grid(2) is step.grid(2)
    assert step.taps(4) is step.taps(4)
    assert step.grid(2) is not step.grid(3)


def test_windows_end_at_their_own_tokens_and_begin_in_their_own_state() -> None:
    step, width = step_of([1, 3, 5]), 4
    taps = step.taps(width)
    rows = torch.full((taps.rows, 2), -1)  # (sequence, position), the saved rows at -3, -2, -1
    rows[taps.own] = torch.tensor([(s, p) for s, n in enumerate([1, 3, 5]) for p in range(n)])
    rows[taps.old] = torch.tensor([[(s, p) for p in (-3, -2, -1)] for s in range(3)])
    assert (rows[:, 0] >= 0).all(), "every row is somebody's"
    for token, (s, p) in zip(taps.own.tolist(), rows[taps.own].tolist(), strict=True):
        assert rows[token - 3 : token + 1].tolist() == [[s, p + d] for d in (-3, -2, -1, 0)]
    assert rows[taps.last].tolist() == [[[s, n + d] for d in (-3, -2, -1)] for s, n in enumerate([1, 3, 5])]


def test_fresh_sequences_begin_with_zeros_whatever_their_pages_hold() -> None:
    view = torch.arange(12.0).view(6, 2)
    view[4] = float("nan")
    step = step_of([1, 2, 1], past=[7, 0, 3], pages=[2, 4, 5])
    assert step.load(view).tolist() == [[4, 5], [0, 0], [10, 11]]
    assert step.load(view, torch.tensor([1, 2])).tolist() == [[0, 0], [10, 11]]
    assert step.load(view, torch.tensor([0])).tolist() == [[4, 5]]
    step.load(view).fill_(0)
    assert view[2].tolist() == [4, 5], "what was loaded is a copy"


def test_states_are_stored_in_their_own_pages_and_rounded_to_them() -> None:
    view = torch.zeros(6, 2, dtype=torch.bfloat16)
    step = step_of([1, 2, 1], pages=[2, 4, 5])
    step.store(view, torch.tensor([[1.001, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert view.tolist() == [[0, 0], [0, 0], [1, 2], [0, 0], [3, 4], [5, 6]]
    step.store(view, torch.tensor([[8.0, 9.0]]), torch.tensor([2]))
    assert view[5].tolist() == [8, 9]
    assert view[4].tolist() == [3, 4]


def test_a_sequence_without_a_page_is_refused() -> None:
    with pytest.raises(IndexError, match="has no state page"):
        step_of([1, 1], pages=[3, 0])


def test_a_view_is_the_arena_in_place() -> None:
    spec = state_spec([("0.conv", (3, 5), "bfloat16"), ("0.ssm", (2, 3), "float32")])
    group = Group("state", spec, "state")
    arena = torch.zeros(spec.page_bytes * 4 + 8, dtype=torch.uint8)
    conv, ssm = state_view(arena, group, "0.conv"), state_view(arena, group, "0.ssm")
    assert conv.shape == (4, 3, 5)
    assert ssm.shape == (4, 2, 3)
    conv[2], ssm[2] = 1, 2
    page = arena[2 * spec.page_bytes : 3 * spec.page_bytes]
    assert page[:30].view(torch.bfloat16).tolist() == [1.0] * 15
    assert page[spec.part("0.ssm").offset :][:24].view(torch.float32).tolist() == [2.0] * 6
    assert arena.count_nonzero() == page.count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_convolution_in_any_chunks_is_the_convolution(cut: Cut, width: int, dtype: torch.dtype) -> None:
    """Of the whole sequence after zeros; kernels wider than some sequences and chunks are among them."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*n, generator=g).to(dtype) for n in ((sum(LENGTHS), 5), (5, width), (5,)))
    states = States(len(LENGTHS), (width - 1, 5), str(dtype).removeprefix("torch."))
    out = serve(lambda step, t: causal_conv(step, states.view, x[t], weight, bias), LENGTHS, states, cut)
    assert out.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    for s, tokens in enumerate(sequences(LENGTHS)):
        padded = functional.pad(x[tokens].t().double(), (width - 1, 0))
        expected = functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=5).t()
        torch.testing.assert_close(out[tokens].double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(states.now[s].double(), padded.t()[-(width - 1) :])
    assert states.only_theirs_changed()


def test_a_convolution_without_a_bias_has_none() -> None:
    x, states = torch.randn(4, 2), States(1, (2, 2))
    out = serve(lambda step, t: causal_conv(step, states.view, x[t], torch.ones(2, 3)), [4], states, CUTS["whole"])
    torch.testing.assert_close(out[3], x[1:].sum(0))
