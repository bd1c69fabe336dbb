"""The real-gated linear recurrent unit against its recurrence, token by token, in double precision."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.serving import CUTS, LENGTHS, Cut, States, sequences, serve

from isthmus.kernels.rglru import rglru


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_chunks_give_the_recurrence(cut: Cut, dtype: torch.dtype) -> None:
    """A sequence's first token enters without the gain, whatever it decays by; no later one does."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(LENGTHS), 5, generator=g).to(dtype)
    decay = -4 * torch.rand(sum(LENGTHS), 5, generator=g) ** 4 - 1e-3
    states = States(len(LENGTHS), (5,))
    out = serve(lambda step, t: rglru(step, states.view, x[t], decay[t]), LENGTHS, states, cut)
    assert out.dtype is dtype
    tolerance = 2e-5 if dtype is torch.float32 else 1e-2
    for s, tokens in enumerate(sequences(LENGTHS)):
        state = torch.zeros(5, dtype=torch.double)
        for t in range(tokens.start, tokens.stop):
            gain = (1 - (2 * decay[t].double()).exp()).sqrt() if t > tokens.start else 1
            state = decay[t].double().exp() * state + gain * x[t]
            torch.testing.assert_close(out[t].double(), state, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states.now[s].double(), state, rtol=2e-5, atol=2e-5)
    assert states.only_theirs_changed()
