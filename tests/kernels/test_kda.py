"""What is particular about decays per channel: `tests/kernels/test_gated_delta.py` has what both rules must do."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.delta_rule import K_DIM, World

from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.kda import _products, kimi_delta_rule


def test_channels_that_fade_alike_fade_like_a_head() -> None:
    per_head, per_channel = World([100], 1), World([100], 1)
    (s,) = per_channel.sequences
    s.decay = s.decay.expand(-1, -1, K_DIM)
    for world, rule in ((per_head, gated_delta_rule), (per_channel, kimi_delta_rule)):
        world.step(rule, (99,))
        world.step(rule, (1,))
        world.check()
    torch.testing.assert_close(torch.cat(s.out), torch.cat(per_head.sequences[0].out), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 16, 64])
@pytest.mark.parametrize("fade", [0.01, 3.0, 90.0])
def test_products_are_exact_to_the_last_bits(size: int, fade: float) -> None:
    """Of every pair of tokens, however far apart the fading between them has driven its channels."""
    draw = torch.Generator().manual_seed(0)
    rows, keys = torch.rand(2, 3, 2, size, 5, generator=draw), torch.rand(2, 3, size, 5, generator=draw)
    faded = (-fade * torch.rand(2, 3, size, 5, generator=draw) ** 4).cumsum(2)
    wide = faded.double()
    factors = (wide[:, :, :, None] - wide[:, :, None]).clamp(max=0).exp()
    expected = torch.einsum("nhrik,nhjk,nhijk->nhrij", rows.double(), keys.double(), factors).tril()
    torch.testing.assert_close(_products(rows, keys, faded).double(), expected, rtol=2e-5 * max(1, fade), atol=1e-30)
