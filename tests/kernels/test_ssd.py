"""State space duality against its recurrence, token by token, in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from tests.kernels.serving import CUTS, LENGTHS, Cut, States, sequences, serve
from torch import Tensor
from torch.nn import functional

from isthmus.kernels import ssd as module
from isthmus.kernels.ssd import decayed_attention, ssd
from isthmus.kernels.states import StateStep

HEADS, GROUPS, P, N = 6, 2, 5, 7
TOKENS = sum(LENGTHS)


@dataclass
class Inputs:
    """Of all tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    dt: Tensor
    dt_bias: Tensor
    rate: Tensor
    skip: Tensor

    @classmethod
    def draw(cls) -> Inputs:
        g = torch.Generator().manual_seed(0)
        query, key = (torch.randn(TOKENS, GROUPS, N, generator=g) for _ in range(2))
        value, dt = torch.randn(TOKENS, HEADS, P, generator=g), 3 * torch.randn(TOKENS, HEADS, generator=g)
        return cls(query, key, value, dt, torch.randn(HEADS), -torch.linspace(0.1, 6, HEADS), torch.randn(HEADS))

    def serve(self, states: States, cut: Cut, limit: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
        def operation(step: StateStep, t: Tensor) -> Tensor:
            query, key, value, dt = self.query[t], self.key[t], self.value[t], self.dt[t]
            return ssd(step, states.view, query, key, value, dt, self.dt_bias, self.rate, self.skip, limit=limit)

        return serve(operation, LENGTHS, states, cut)

    def expected(self, limit: tuple[float, float] = (0.0, float("inf"))) -> tuple[Tensor, Tensor]:
        """Outputs, and each sequence's last state."""
        dt = functional.softplus((self.dt + self.dt_bias).double()).clamp(*limit)
        out, last = recurrence(self.query, self.key, self.value, dt * self.rate, dt)
        return out + self.value * self.skip[:, None], last


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, decay, gain = (x.double() for x in (query, key, value, decay, gain))
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1) for x in (query, key))
    outs, last = [], []
    for tokens in sequences(LENGTHS):
        state = torch.zeros(*value.shape[1:], key.shape[2], dtype=torch.double)
        for t in range(tokens.start, tokens.stop):
            entering = (gain[t, :, None] * value[t])[:, :, None] * key[t, :, None]
            state = decay[t].exp()[:, None, None] * state + entering
            outs.append((state @ query[t, :, :, None])[..., 0])
        last.append(state)
    return torch.stack(outs), torch.stack(last)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_chunks_give_the_recurrence(cut: Cut) -> None:
    inputs, states = Inputs.draw(), States(len(LENGTHS), (HEADS, P, N))
    out, last = inputs.expected()
    close(inputs.serve(states, cut), out)
    close(states.now, last)
    assert states.only_theirs_changed()


@pytest.mark.parametrize("cut", ["whole", "one by one"])
def test_step_sizes_stay_within_the_limit(cut: str) -> None:
    inputs, limit = Inputs.draw(), (0.4, 1.1)
    out, _ = inputs.expected(limit)
    close(inputs.serve(States(len(LENGTHS), (HEADS, P, N)), CUTS[cut], limit), out)
    assert (out - inputs.expected()[0]).abs().max() > 0.1


def test_small_decays_after_large_ones_are_exact() -> None:
    """Sums of decays in a chunk reach 1e5, where fp32 counts in steps of a hundredth."""
    inputs, states = Inputs.draw(), States(len(LENGTHS), (HEADS, P, N))
    decay = torch.where(torch.arange(TOKENS) % 64 < 20, -5e3, -0.01)[:, None].expand(TOKENS, HEADS)
    gain = torch.ones(TOKENS, HEADS)
    given = inputs.query, inputs.key, inputs.value, decay, gain
    out = serve(
        lambda step, t: decayed_attention(step, states.view, *(x[t] for x in given)), LENGTHS, states, CUTS["whole"]
    )
    close(out, recurrence(*given)[0], 1e-4)


@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_the_size_of_the_chunks_inside_does_not_show(chunk: int) -> None:
    inputs, states = Inputs.draw(), States(len(LENGTHS), (HEADS, P, N))
    gain = functional.softplus(inputs.dt)
    given = inputs.query, inputs.key, inputs.value, gain * inputs.rate, gain
    operation = partial(decayed_attention, chunk=chunk)
    out = serve(lambda step, t: operation(step, states.view, *(x[t] for x in given)), LENGTHS, states, CUTS["whole"])
    close(out, recurrence(*given)[0])
    close(states.now, recurrence(*given)[1])


def test_work_is_cut_to_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time gives what all give side by side."""
    inputs = Inputs.draw()
    monkeypatch.setattr(module, "SLAB_BYTES", 1)
    states = States(len(LENGTHS), (HEADS, P, N))
    close(inputs.serve(states, CUTS["ragged"]), inputs.expected()[0])


def test_sixteen_bit_inputs_come_out_as_they_came_with_the_state_in_full() -> None:
    inputs, states = Inputs.draw(), States(len(LENGTHS), (HEADS, P, N))
    for name in ("query", "key", "value", "dt"):
        setattr(inputs, name, getattr(inputs, name).bfloat16())
    out, last = inputs.expected()
    got = inputs.serve(states, CUTS["ragged"])
    assert got.dtype is torch.bfloat16
    close(got, out, 3e-2)
    close(states.now, last)
