"""Decode kernels in an arena of NaN, and operations as a device runs them, against the CPU's operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tests.kernels.serving import States
from torch import Tensor

from isthmus.kernels.states import Int64, StateStep, state_view
from isthmus.memory import Group, state_spec
from isthmus.model.device_states import OPERATIONS, DeviceStep

LANES = 7
PADDING = 2  # this lane is nobody's
FRESH = [1, 4]
TOKENS = [3, 0, 8, 5, 1, 2, 7]  # of a flat batch of nine

COUNTS = {"decodes": [1] * 6, "mixed": [1, 5, 1, 1, 70, 1]}
"""Tokens of the sequences of a step."""


@dataclass
class Lanes:
    """A part of state pages, on a device and as the CPU has it."""

    device: str
    group: Group
    arena: Tensor  # on the device
    before: Tensor  # its bytes, on the CPU
    cpu: Tensor  # the part
    pages: np.ndarray
    fresh: np.ndarray

    @classmethod
    def of(cls, device: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Lanes:
        name = str(dtype).removeprefix("torch.")
        parts = [("0.x", (3,), "bfloat16"), ("1.x", shape, name), ("2.x", shape, name)]
        group = Group("state", state_spec(parts), "state")
        pages = np.random.default_rng(0).permutation(np.arange(1, LANES + 3))[:LANES]
        pages[PADDING] = 0
        fresh = np.isin(np.arange(LANES), FRESH)
        arena = torch.full(((LANES + 4) * group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
        known = pages[~fresh & (pages > 0)]
        state_view(arena, group, "1.x")[known] = torch.randn(len(known), *shape).to(dtype)
        before = arena.clone()
        return cls(device, group, arena.to(device, copy=True), before, state_view(arena, group, "1.x"), pages, fresh)

    @property
    def view(self) -> Tensor:
        return state_view(self.arena, self.group, "1.x")

    def on_device(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the kernels take them."""
        tokens = torch.tensor(TOKENS, dtype=torch.int32, device=self.device)
        pages = torch.from_numpy(self.pages.astype(np.int32)).to(self.device)
        return self.view, pages, torch.from_numpy(self.fresh).to(self.device), tokens

    @property
    def live(self) -> np.ndarray:
        return np.flatnonzero(self.pages)

    def step(self) -> StateStep:
        """Of the lanes that are somebody's."""
        live = self.live
        return StateStep.of(np.arange(len(live) + 1), np.where(self.fresh[live], 0, 9), self.pages[live])

    def rows(self, x: Tensor) -> Tensor:
        """Those lanes' rows of the flat batch, in full precision."""
        return x.cpu()[np.array(TOKENS)[self.live]].float()

    def blank(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Where outputs go, of all tokens."""
        return torch.full((9, *shape), 77, dtype=dtype, device=self.device)

    def check(self, out: Tensor, expected: Tensor, *, atol: float = 1e-5) -> None:
        """Outputs and states are as the CPU has them, but for their rounding; padding is zero; the rest is as before.

        Args:
            out: `[9, ..]`, that was made blank.
            expected: those of the lanes that are somebody's.
            atol: more where hundreds of products are summed up, in another order.
        """
        torch.testing.assert_close(self.rows(out), expected, rtol=_rounding(out.dtype), atol=atol)
        mine, view = self.pages[self.live], self.view.cpu()
        torch.testing.assert_close(view[mine], self.cpu[mine], rtol=_rounding(view.dtype), atol=atol)
        assert not out[TOKENS[PADDING]].any(), "padding lanes must hold numbers: later layers compute with them"
        assert (out[[row for row in range(9) if row not in TOKENS]] == 77).all()
        rest = self.arena.cpu().clone()
        state_view(rest, self.group, "1.x")[mine] = state_view(self.before, self.group, "1.x")[mine]
        assert torch.equal(rest, self.before), "bytes of nobody, or of other parts, were written"


def _rounding(dtype: torch.dtype) -> float:
    return max(1e-5, torch.finfo(dtype).eps)


def device_step(query_start: Int64, past: Int64, pages: Int64, device: str) -> DeviceStep:
    """As a runner has it; past is 0 for a sequence at least."""
    step = DeviceStep.of(query_start, past, pages)
    for name in ("pages", "fresh", "starts", "ends", "decodes", "chunks", "owner"):
        setattr(step, name, getattr(step, name).to(device))
    step.upload = lambda array: torch.from_numpy(array).to(device)
    return step


def check_operation(
    device: str, operation: Callable[..., Tensor], counts: list[int], shape: tuple[int, ...], *inputs: Tensor,
    tokens: int, **settings: tuple[float, ...],
) -> None:  # fmt: skip
    """What a device runs for `operation` gives what the CPU does, to fp32's rounding.

    inputs: those of which the first `tokens` have a row per token, then those that have none.
    """
    starts, past = np.cumsum([0, *counts]), np.where(np.arange(len(counts)) % 3 == 0, 0, 9)
    states = States(len(counts), shape)
    known = states.pages[past > 0]
    states.view[known] = torch.randn(len(known), *shape)
    there = state_view(states.arena.to(device, copy=True), states.group, "0.state")
    step = device_step(starts, past, states.pages, device)
    rows = [x[: starts[-1]] if i < tokens else x for i, x in enumerate(inputs)]
    out = OPERATIONS[operation.__name__].run(step, there, *(x.to(device) for x in rows), **settings)
    expected = operation(StateStep.of(starts, past, states.pages), states.view, *rows, **settings)
    assert out.dtype is expected.dtype
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(there.cpu(), states.view, rtol=1e-5, atol=2e-5, equal_nan=True)
