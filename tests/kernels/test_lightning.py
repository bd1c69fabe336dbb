"""Lightning attention against its recurrence, token by token, in double precision."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.serving import CUTS, LENGTHS, Cut, States, sequences, serve

from isthmus.kernels.lightning import lightning_attention

HEADS, K, V = 3, 6, 5


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_chunks_give_the_recurrence(cut: Cut) -> None:
    """Heads that forget at once, slowly, and never."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), HEADS, n, generator=g) for n in (K, K, V))
    slope, states = torch.tensor([30.0, 0.05, 0.0]), States(len(LENGTHS), (HEADS, V, K))
    out = serve(
        lambda step, t: lightning_attention(step, states.view, query[t], key[t], value[t], slope), LENGTHS, states, cut
    )
    for s, tokens in enumerate(sequences(LENGTHS)):
        state = torch.zeros(HEADS, V, K, dtype=torch.double)
        for t in range(tokens.start, tokens.stop):
            state = (-slope.double()).exp()[:, None, None] * state + value[t].double()[:, :, None] * key[t][:, None]
            read = (state @ query[t].double()[:, :, None])[..., 0]
            torch.testing.assert_close(out[t].double(), read, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(states.now[s].double(), state, rtol=1e-5, atol=1e-5)
    assert states.only_theirs_changed()
