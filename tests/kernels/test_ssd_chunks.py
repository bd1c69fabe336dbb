"""Chunks of Mamba-2 and of lightning attention on states where they lie, in an arena of NaN, against the CPU's.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.serving import States
from torch import Tensor

from isthmus.kernels.lightning import lightning_attention
from isthmus.kernels.ssd import ssd
from isthmus.kernels.ssd_chunks import lightning_chunks, ssd_chunks
from isthmus.kernels.states import StateStep, state_view

COUNTS = [1, 5, 64, 2, 130, 3]
MEANT = [4, 1, 2, 5, 3]  # sequences with several tokens, in any order
PAST = [3, 0, 9, 1, 6, 0]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""Error over size."""


class Step:
    """The sequences of a step, on a device and as the CPU has them. The last one is padding."""

    def __init__(self, device: str, *shape: int) -> None:
        torch.manual_seed(0)
        self.states = States(len(COUNTS), shape)
        past = np.array(PAST)
        known = self.states.pages[past > 0]
        self.states.view[known] = torch.randn(len(known), *shape)
        start = np.cumsum([0, *COUNTS])
        self.cpu = StateStep.of(start, past, self.states.pages)
        pages = np.where(np.arange(len(COUNTS)) == len(COUNTS) - 1, 0, self.states.pages)
        arrays = (pages, past == 0, start[:-1], start[1:] - 1, np.array(MEANT))
        page, fresh, first, last, meant = (torch.from_numpy(x).to(device) for x in arrays)
        self.where = page, fresh, first, last, meant
        self.view = state_view(self.states.arena.to(device, copy=True), self.states.group, "0.state")

    def check(self, out: Tensor, expected: Tensor) -> None:
        """Each sequence's outputs, and its state unless it is padding; nobody else's."""
        bounds = np.cumsum([0, *COUNTS])
        for i, page in enumerate(self.states.pages):
            rows = slice(bounds[i], bounds[i + 1])
            if i not in MEANT:
                assert (out[rows] == 77).all()
                continue
            self.near(out[rows], expected[rows], out.dtype)
            if i < len(COUNTS) - 1:
                self.near(self.view[page], self.states.view[page], out.dtype)
        meant = [self.states.pages[i] for i in MEANT[:3] + MEANT[4:]]
        others = [page for page in range(len(self.view)) if page not in [*meant, self.states.pages[0]]]
        assert self.view[others].isnan().all()

    @staticmethod
    def near(given: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        given, expected = given.cpu().float(), expected.float()
        assert float((given - expected).norm() / expected.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("groups", "heads", "p", "n"), [(2, 4, 12, 20), (1, 2, 70, 16)])
def test_mamba2(device: str, groups: int, heads: int, p: int, n: int, dtype: torch.dtype) -> None:
    """Strong fading and weak, step sizes at their limits, heads that take several programs, slices of a projection."""
    step = Step(device, heads, p, n)
    wide = torch.randn(sum(COUNTS), 3 + heads * p + 2 * groups * n + heads).to(dtype)
    sizes = [3, heads * p, groups * n, groups * n, heads]
    _, value, key, query, dt = torch.split(wide.to(device), sizes, 1)
    value = torch.unflatten(value, 1, (heads, p))
    key, query = (torch.unflatten(x, 1, (groups, n)) for x in (key, query))
    dt_bias, skip = (torch.randn(heads, device=device).to(dtype) for _ in range(2))
    rate = -torch.linspace(0.01, 9, heads, device=device)
    out = torch.full_like(value, 77, memory_format=torch.contiguous_format)
    limit = (0.4, 1.1)
    ssd_chunks(step.view, step.where, query, key, value, dt, dt_bias, rate, skip, out, limit=limit)
    given = (x.cpu().float() for x in (query, key, value, dt, dt_bias, rate, skip))
    step.check(out, ssd(step.cpu, step.states.view, *given, limit=limit))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lightning(device: str, dtype: torch.dtype) -> None:
    """A head's query, key and value side by side; heads that do not fade at all."""
    heads, v, k = 3, 70, 12
    step = Step(device, heads, v, k)
    together = torch.randn(sum(COUNTS), heads, 2 * k + v).to(dtype).to(device)
    query, key, value = torch.split(together, [k, k, v], -1)
    slope = torch.linspace(0, 3, heads, device=device)
    out = torch.full_like(value, 77, memory_format=torch.contiguous_format)
    lightning_chunks(step.view, step.where, query, key, value, slope, out)
    given = (x.cpu().float() for x in (query, key, value, slope))
    step.check(out, lightning_attention(step.cpu, step.states.view, *given))
