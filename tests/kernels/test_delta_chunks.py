"""Chunks of the delta rules against the rules token by token in float64. Without a GPU through Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.kernels.serving import States
from torch import Tensor

from isthmus.kernels.delta_chunks import delta_chunks
from isthmus.kernels.gated_delta import UNIT
from isthmus.kernels.states import state_view

COUNTS = [1, 5, 64, 2, 130, 1, 1, 3]
"""Pieces of a few tokens and of whole blocks, ends in the middle of one, several sequences in a block."""

MEANT = [4, 1, 2, 7, 3]  # sequences with several tokens, in any order
PAST = [3, 0, 9, 1, 6, 2, 0, 0]
PADDING = 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Error over size, where queries and keys are rounded at unit length alike."""


@dataclass
class Rows:
    """Of the tokens of a step."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def drawn(cls, heads: int, key_heads: int, k: int, v: int, channels: int, dtype: torch.dtype, fade: float) -> Rows:
        """Of heads that fade by nothing at all to `fade` times e a token."""
        tokens = sum(COUNTS)
        query, key = (torch.randn(tokens, key_heads, k).to(dtype) for _ in range(2))
        decay = -torch.rand(tokens, heads, channels) * torch.linspace(0, fade, heads)[:, None]
        decay = decay * (torch.rand(decay.shape) < 0.5)
        beta = 2 * torch.rand(tokens, heads)
        return cls(query, key, torch.randn(tokens, heads, v).to(dtype), decay, beta)

    def on(self, device: str) -> list[Tensor]:
        decay = self.decay[..., 0] if self.decay.shape[-1] == 1 else self.decay
        return [x.to(device) for x in (self.query, self.key, self.value, decay, self.beta)]

    def expected(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of some tokens after `state`, and the state behind them."""
        heads, k = self.value.shape[1], self.key.shape[-1]
        query, key = (_unit(x[rows]).repeat_interleave(heads // x.shape[1], 1) for x in (self.query, self.key))
        value, decay, beta = (x[rows].double() for x in (self.value, self.decay, self.beta))
        out = []
        for t in range(len(value)):
            state = state * decay[t].exp()[..., None]
            write = (value[t] - torch.einsum("hk,hkv->hv", key[t], state)) * beta[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", key[t], write)
            out.append(torch.einsum("hk,hkv->hv", query[t], state) * k**-0.5)
        return torch.stack(out), state


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + UNIT)).to(x.dtype).double()


class Step:
    """The sequences of a step over an arena of NaN; the last one is padding."""

    def __init__(self, device: str, heads: int, k: int, v: int) -> None:
        self.states = States(len(COUNTS), (heads, k, v))
        past, self.bounds = np.array(PAST), np.cumsum([0, *COUNTS])
        known = self.states.pages[past > 0]
        self.states.view[known] = torch.randn(len(known), heads, k, v)
        pages = np.where(np.arange(len(COUNTS)) == PADDING, 0, self.states.pages)
        arrays = (pages, past == 0, self.bounds[:-1], self.bounds[1:] - 1, np.array(MEANT))
        page, fresh, first, last, meant = (torch.from_numpy(x).to(device) for x in arrays)
        self.where = page, fresh, first, last, meant
        self.owner = torch.from_numpy(np.repeat(np.arange(len(COUNTS)), COUNTS)).to(device)
        self.view = state_view(self.states.arena.to(device, copy=True), self.states.group, "0.state")

    def run(self, given: list[Tensor], out: Tensor) -> None:
        query, key, value, decay, beta = given
        delta_chunks(self.view, self.where, self.owner, query, key, value, decay, beta, out)

    def check(self, rows: Rows, out: Tensor, tolerance: float) -> None:
        """Each sequence's outputs, and its state unless it is padding; nobody else's."""
        for i, page in enumerate(self.states.pages):
            own = slice(self.bounds[i], self.bounds[i + 1])
            if i not in MEANT:
                assert (out[own] == 77).all()
                continue
            if i == PADDING:
                assert not out[own].any(), "padding must hold numbers: later layers compute with it"
                continue
            before = self.states.view[page].double() if PAST[i] else torch.zeros(self.view.shape[1:]).double()
            expected, state = rows.expected(own, before)
            assert error(out[own], expected) < tolerance
            assert error(self.view[page], state) < tolerance
        meant = [self.states.pages[i] for i in MEANT if i != PADDING]
        for page in range(len(self.view)):
            if page not in meant:
                now, then = self.view[page].cpu(), self.states.view[page]
                assert torch.equal(now.view(torch.int32), then.view(torch.int32)), "a state of nobody here"


def error(given: Tensor, expected: Tensor) -> float:
    return float((given.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("fade", [0.5, 30.0])
@pytest.mark.parametrize(("key_heads", "heads", "k", "v"), [(2, 4, 12, 20), (1, 2, 72, 70)])
def test_outputs_and_states(
    device: str, key_heads: int, heads: int, k: int, v: int, fade: float, per_channel: bool, dtype: torch.dtype
) -> None:
    """With decays of a head or of every number of its keys, so strong that nothing is left or none at all; heads that
    share keys, take several programs, are no powers of two."""
    torch.manual_seed(0)
    rows = Rows.drawn(heads, key_heads, k, v, k if per_channel else 1, dtype, fade)
    step = Step(device, heads, k, v)
    out = torch.full((sum(COUNTS), heads, v), 77.0, dtype=dtype, device=device)
    step.run(rows.on(device), out)
    step.check(rows, out, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "beta", "tolerance"),
    [(torch.float32, 1.0, 1e-5), (torch.float16, 1.9, 1e-3), (torch.bfloat16, 1.9, 0.05)],
)
@pytest.mark.parametrize("per_channel", [False, True])
def test_keys_that_are_all_alike(
    device: str, per_channel: bool, dtype: torch.dtype, beta: float, tolerance: float
) -> None:
    """A prompt of one token over and over: what is written last replaces everything or turns it, and nothing grows."""
    torch.manual_seed(0)
    rows = Rows.drawn(2, 2, 16, 16, 16 if per_channel else 1, dtype, 0.0)
    rows.key = rows.key[:1].expand_as(rows.key).contiguous()
    rows.beta = torch.full_like(rows.beta, beta)
    step = Step(device, 2, 16, 16)
    out = torch.full((sum(COUNTS), 2, 16), 77.0, device=device, dtype=dtype)
    step.run(rows.on(device), out)
    step.check(rows, out, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_decays_are_not_rounded(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """A state that nobody writes to fades by the same at every token, so that roundings would add up."""
    torch.manual_seed(0)
    rows = Rows.drawn(2, 2, 16, 16, 16, dtype, 1.0)
    for x in (rows.query, rows.key):
        x[:] = torch.eye(16, dtype=dtype)[0]
    rows.decay[:], rows.beta[:] = -0.5018, 0.0  # 0.5 in 16 bits
    step = Step(device, 2, 16, 16)
    out = torch.full((sum(COUNTS), 2, 16), 77.0, device=device, dtype=dtype)
    step.run(rows.on(device), out)
    own = slice(step.bounds[4], step.bounds[5])
    expected, _ = rows.expected(own, step.states.view[step.states.pages[4]].double())
    torch.testing.assert_close(out[own].cpu().double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("per_channel", [False, True])
def test_what_fades_at_once_spoils_no_later_decay(device: str, per_channel: bool) -> None:
    torch.manual_seed(0)
    rows = Rows.drawn(2, 2, 16, 16, 16 if per_channel else 1, torch.float32, 0.01)
    rows.decay[::7] = -1e4
    step = Step(device, 2, 16, 16)
    out = torch.full((sum(COUNTS), 2, 16), 77.0, device=device)
    step.run(rows.on(device), out)
    step.check(rows, out, 1e-4)


def test_rows_of_a_wider_projection(device: str) -> None:
    """Queries, keys and values lie side by side in a token's row, with NaN behind them."""
    torch.manual_seed(0)
    rows = Rows.drawn(2, 2, 16, 16, 1, torch.bfloat16, 1.0)
    wide = torch.full((sum(COUNTS), 100), float("nan"), dtype=torch.bfloat16)
    for i, x in enumerate((rows.query, rows.key, rows.value)):
        wide[:, 32 * i : 32 * (i + 1)] = x.flatten(1)
    given = [wide.to(device)[:, 32 * i : 32 * (i + 1)].view(-1, 2, 16) for i in range(3)]
    step = Step(device, 2, 16, 16)
    out = torch.full((sum(COUNTS), 2, 16), 77.0, dtype=torch.bfloat16, device=device)
    step.run([*given, *rows.on(device)[3:]], out)
    step.check(rows, out, TOLERANCE[torch.bfloat16])


def test_a_token_sees_nobody_else(device: str) -> None:
    """What stands in the same block of 64 tokens changes no bit of a sequence's outputs, NaN or not."""
    torch.manual_seed(0)
    rows = Rows.drawn(2, 2, 16, 16, 16, torch.float32, 1.0)
    results = []
    for spoilt in (False, True):
        if spoilt:  # the sequences beside sequence 1, which share its block
            for x in (rows.query, rows.key, rows.value, rows.decay, rows.beta):
                x[: COUNTS[0]] = float("nan")
                x[COUNTS[0] + COUNTS[1] :] = float("nan")
        step = Step(device, 2, 16, 16)
        out = torch.full((sum(COUNTS), 2, 16), 77.0, device=device)
        step.run(rows.on(device), out)
        results.append(out[COUNTS[0] : COUNTS[0] + COUNTS[1]].cpu())
    assert torch.equal(*results)


def test_nobody(device: str) -> None:
    """A step without such sequences launches nothing."""
    rows = Rows.drawn(2, 2, 16, 16, 1, torch.float32, 1.0)
    step = Step(device, 2, 16, 16)
    out = torch.full((sum(COUNTS), 2, 16), 77.0, device=device)
    step.where = (*step.where[:4], step.where[4][:0])
    step.run(rows.on(device), out)
    assert (out == 77).all()
