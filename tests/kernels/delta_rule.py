"""The gated delta rule token by token in double precision, and steps over an arena of NaN to compare with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from isthmus.kernels.states import StateStep, state_view
from isthmus.memory import Group, state_spec

Operation = Callable[..., Tensor]
KEY_HEADS, HEADS, K_DIM, V_DIM = 2, 6, 12, 20


@dataclass
class Run:
    """All inputs of a sequence, what was computed so far, and what is right."""

    query: Tensor  # [T, KEY_HEADS, K_DIM]
    key: Tensor
    value: Tensor  # [T, HEADS, V_DIM]
    decay: Tensor  # [T, HEADS, 1 or K_DIM]
    beta: Tensor  # [T, HEADS]
    page: int
    done: int = 0
    out: list[Tensor] = field(default_factory=list)

    def inputs(self, n: int) -> tuple[Tensor, ...]:
        """The next `n` tokens', as operations take them."""
        now = slice(self.done, self.done + n)
        decay = self.decay.squeeze(-1) if self.decay.shape[-1] == 1 else self.decay
        return self.query[now], self.key[now], self.value[now], decay[now], self.beta[now]

    def expected(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Outputs and state after so many tokens, in double precision."""
        group = HEADS // KEY_HEADS
        query, key = (unit(x.double()).repeat_interleave(group, 1) for x in (self.query, self.key))
        state = torch.zeros(HEADS, K_DIM, V_DIM, dtype=torch.float64)
        out = []
        for t in range(tokens):
            state = state * self.decay[t].double().exp()[..., None]
            known = torch.einsum("hk,hkv->hv", key[t], state)
            write = (self.value[t].double() - known) * self.beta[t].double()[:, None]
            state = state + torch.einsum("hk,hv->hkv", key[t], write)
            out.append(torch.einsum("hk,hkv->hv", query[t], state) * K_DIM**-0.5)
        return torch.stack(out), state


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class World:
    """Sequences whose states lie in pages of an arena where everything else is NaN, and stays so."""

    def __init__(self, lengths: Sequence[int], channels: int, *, fade: float = 1.0, dtype: torch.dtype = torch.float32):
        """`channels`: decays per head; `fade`: the strongest of them. Half of them are a thousand times weaker."""
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(dtype)

        pages = (torch.randperm(len(lengths) + 2, generator=draw) + 1)[: len(lengths)].tolist()
        self.sequences = []
        for n, page in zip(lengths, pages, strict=True):
            decay = -fade * torch.rand(n, HEADS, channels, generator=draw)
            decay *= torch.where(torch.rand(decay.shape, generator=draw) < 0.5, 1e-3, 1)
            beta = 2 * torch.rand(n, HEADS, generator=draw)
            keys = normal(n, KEY_HEADS, K_DIM), normal(n, KEY_HEADS, K_DIM)
            self.sequences.append(Run(*keys, normal(n, HEADS, V_DIM), decay, beta, page))
        parts = [("0.recurrent", (5,), "bfloat16"), ("3.recurrent", (HEADS, K_DIM, V_DIM), "float32")]
        group = Group("state", state_spec(parts), "state")
        arena = torch.full(((len(lengths) + 3) * group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
        self.other, self.view = (state_view(arena, group, name) for name, _, _ in parts)

    def step(self, operation: Operation, counts: Sequence[int]) -> None:
        """The next tokens of the sequences; of those with none, nothing."""
        running = [(s, n) for s, n in zip(self.sequences, counts, strict=True) if n]
        past, pages = np.array([s.done for s, _ in running]), np.array([s.page for s, _ in running])
        step = StateStep.of(np.cumsum([0, *(n for _, n in running)]), past, pages)
        inputs = (torch.cat(rows) for rows in zip(*(s.inputs(n) for s, n in running), strict=True))
        rows = operation(step, self.view, *inputs)
        for (s, n), out in zip(running, torch.split(rows, [n for _, n in running]), strict=True):
            s.out.append(out)
            s.done += n

    def check(self, tolerance: float = 2e-5) -> None:
        """Outputs and states are right; nothing else was written."""
        live = [s.page for s in self.sequences if s.done]
        for s in self.sequences:
            if s.done:
                out, state = s.expected(s.done)
                torch.testing.assert_close(torch.cat(s.out).double(), out, rtol=0, atol=tolerance)
                torch.testing.assert_close(self.view[s.page].double(), state, rtol=0, atol=tolerance)
        others = [page for page in range(len(self.view)) if page not in live]
        assert self.view[others].isnan().all()
        assert self.other.isnan().all()
