"""Elementwise linear recurrences, and the scan that computes them."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.serving import CUTS, LENGTHS, Cut, States, sequences, serve

from isthmus.kernels.recurrence import linear_recurrence, scan_


@pytest.mark.parametrize("count", [*range(1, 18), 63, 64, 65, 1000])
def test_a_scan_of_any_length_is_the_loop(count: int) -> None:
    """With a row now and then that has no predecessor."""
    decay, added = torch.rand(count, 3), torch.randn(count, 3)
    first = torch.rand(count) < 0.1
    expected = [added[0].double()]
    for t in range(1, count):
        before = 0 if first[t] else decay[t].double() * expected[-1]
        expected.append(added[t].double() + before)
    scan_(decay, added, first)
    torch.testing.assert_close(added.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_chunks_give_the_recurrence(cut: Cut) -> None:
    """Decays of exactly 0 and 1 among them."""
    decay, added = torch.rand(sum(LENGTHS), 2, 3), torch.randn(sum(LENGTHS), 2, 3)
    decay[::5], decay[::7] = 0, 1
    states = States(len(LENGTHS), (2, 3))
    out = serve(lambda step, t: linear_recurrence(step, states.view, decay[t], added[t]), LENGTHS, states, cut)
    for s, tokens in enumerate(sequences(LENGTHS)):
        state = torch.zeros(2, 3, dtype=torch.double)
        for t in range(tokens.start, tokens.stop):
            state = decay[t] * state + added[t]
            torch.testing.assert_close(out[t].double(), state, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states.now[s].double(), state, rtol=1e-5, atol=1e-6)
    assert states.only_theirs_changed()


def test_a_sequence_that_overflows_spoils_no_other() -> None:
    decay, added = torch.rand(sum(LENGTHS), 4), torch.randn(sum(LENGTHS), 4)
    bad = sequences(LENGTHS)[1]
    added[bad] = float("inf")
    decay[bad.start + 3] = 0  # infinity times zero: not a number
    states = States(len(LENGTHS), (4,))
    out = serve(
        lambda step, t: linear_recurrence(step, states.view, decay[t], added[t]), LENGTHS, states, CUTS["ragged"]
    )
    assert out[bad].isfinite().sum() == 0
    assert out[: bad.start].isfinite().all()
    assert out[bad.stop :].isfinite().all()
