"""The gated delta rule in chunks, mixed with decodes, against one token after the other in double precision."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.kernels.delta_rule import HEADS, K_DIM, V_DIM, Operation, World
from torch import Tensor

from isthmus.kernels import gated_delta
from isthmus.kernels.gated_delta import CHUNK, gated_delta_rule
from isthmus.kernels.kda import kimi_delta_rule

RULES: dict[str, tuple[Operation, int]] = {
    "decay per head": (gated_delta_rule, 1),
    "decay per channel": (kimi_delta_rule, K_DIM),
}
LENGTHS = (1, 140, 64, 3, 9, 2, 66)


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> tuple[Operation, int]:
    return RULES[request.param]


def test_a_step_of_everything(rule: tuple[Operation, int]) -> None:
    """New and old sequences, one token and several chunks of them, in one step; then one token of each."""
    operation, channels = rule
    world = World(LENGTHS, channels)
    world.step(operation, (0, 5, 0, 1, 7, 1, 0))
    world.check()
    world.step(operation, (1, 134, 63, 1, 1, 0, 65))
    world.check()
    world.step(operation, (0, 1, 1, 1, 1, 1, 1))
    world.check()


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 65, 140])
def test_how_a_prompt_is_cut_changes_nothing(rule: tuple[Operation, int], chunk: int) -> None:
    operation, channels = rule
    world = World([140, 140], channels)
    for start in range(0, 140, chunk):
        n = min(chunk, 140 - start)
        world.step(operation, (n, n))
    world.check()


@pytest.mark.parametrize("fade", [20.0, 500.0])
def test_strong_decays(rule: tuple[Operation, int], fade: float) -> None:
    """Nothing overflows where a chunk fades by a factor far beyond what fp32 holds, and beside it what hardly fades."""
    operation, channels = rule
    world = World([140], channels, fade=fade)
    world.step(operation, (139,))
    world.step(operation, (1,))
    world.check(1e-3 if fade > 100 else 5e-5)


def test_the_same_key_again_and_again(rule: tuple[Operation, int]) -> None:
    """Where `beta` is 2 and nothing fades, each token turns around what the one before it left."""
    operation, channels = rule
    world = World([130], channels, fade=0)
    (s,) = world.sequences
    s.key[:] = s.key[:1]
    s.beta.fill_(2)
    world.step(operation, (130,))
    world.check(5e-3)  # a key of a length off by the last bit, squared, 130 times


def test_in_small_slabs(rule: tuple[Operation, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary memory is bounded by cutting the work; the cuts go through ranks and between them."""
    operation, channels = rule
    sizes = []

    def products(rows: Tensor, keys: Tensor, faded: Tensor) -> Tensor:
        sizes.append(len(rows))
        out: Tensor = actual(rows, keys, faded)
        return out

    module = sys.modules[operation.__module__]
    actual = module._products
    monkeypatch.setattr(module, "_products", products)
    three_chunks = 3 * HEADS * CHUNK * (8 * K_DIM + 4 * V_DIM + 4 * CHUNK) * 4
    monkeypatch.setattr(gated_delta, "SLAB_BYTES", three_chunks)
    monkeypatch.setattr(gated_delta, "DECODE_BYTES", 2 * HEADS * K_DIM * V_DIM * 4)
    world = World([200, 65, 70, 130, 2, 1, 1, 1, 1, 1], channels)
    world.step(operation, [len(s.key) for s in world.sequences])
    world.check()
    assert sizes == [3, 2, 3, 3, 1]  # of ranks with 5, 4, 2 and 1 chunks


def test_bf16_inputs(rule: tuple[Operation, int]) -> None:
    """Only inputs and outputs are rounded; states are not."""
    operation, channels = rule
    world = World([100, 3], channels, dtype=torch.bfloat16)
    world.step(operation, (99, 3))
    world.step(operation, (1, 0))
    for s in world.sequences:
        out, state = s.expected(s.done)
        assert s.out[0].dtype == torch.bfloat16
        torch.testing.assert_close(torch.cat(s.out).double(), out, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(world.view[s.page].double(), state, rtol=0, atol=2e-5)
