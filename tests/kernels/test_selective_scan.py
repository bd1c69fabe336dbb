"""The selective scan against its recurrence, token by token, in double precision."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.serving import CUTS, LENGTHS, Cut, States, sequences, serve
from torch import Tensor
from torch.nn import functional

from isthmus.kernels import selective_scan as module
from isthmus.kernels.selective_scan import selective_scan

GROUPS, D, N = 2, 5, 3


def draw() -> tuple[Tensor, ...]:
    """x, dt, B, C; rate, skip."""
    g = torch.Generator().manual_seed(0)
    x, dt = (torch.randn(sum(LENGTHS), GROUPS, D, generator=g) for _ in range(2))
    b, c = (torch.randn(sum(LENGTHS), GROUPS, N, generator=g) for _ in range(2))
    return x, 2 * dt - 1, b, c, -8 * torch.rand(GROUPS, D, N, generator=g), torch.randn(GROUPS, D, generator=g)


def run(given: tuple[Tensor, ...], states: States, cut: Cut) -> Tensor:
    x, dt, b, c, rate, skip = given
    return serve(
        lambda step, t: selective_scan(step, states.view, x[t], dt[t], b[t], c[t], rate, skip), LENGTHS, states, cut
    )


def check(given: tuple[Tensor, ...], out: Tensor, states: States, tolerance: float) -> None:
    x, dt, b, c, rate, skip = (given_.double() for given_ in given)
    dt = functional.softplus(dt)[..., None]
    for s, tokens in enumerate(sequences(LENGTHS)):
        state = torch.zeros(GROUPS, D, N, dtype=torch.double)
        for t in range(tokens.start, tokens.stop):
            state = (rate * dt[t]).exp() * state + dt[t] * x[t][..., None] * b[t][:, None]
            expected = (state @ c[t][..., None])[..., 0] + skip * x[t]
            torch.testing.assert_close(out[t].double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states.now[s].double(), state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_chunks_give_the_recurrence(cut: Cut) -> None:
    given, states = draw(), States(len(LENGTHS), (GROUPS, D, N))
    check(given, run(given, states, cut), states, 1e-5)
    assert states.only_theirs_changed()


def test_work_is_cut_to_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two channels at a time, then the one that is left, give what all give side by side."""
    given, states = draw(), States(len(LENGTHS), (GROUPS, D, N))
    monkeypatch.setattr(module, "SLAB_BYTES", 2 * sum(LENGTHS) * GROUPS * N * 24)
    check(given, run(given, states, CUTS["whole"]), states, 1e-5)


def test_sixteen_bit_inputs_come_out_as_they_came_with_the_state_in_full() -> None:
    x, dt, b, c, rate, skip = draw()
    given, states = (*(t.bfloat16() for t in (x, dt, b, c)), rate, skip), States(len(LENGTHS), (GROUPS, D, N))
    out = run(given, states, CUTS["ragged"])
    assert out.dtype is torch.bfloat16
    check(given, out, states, 2e-2)
