"""Convolutions of chunks and decodes together, in an arena of NaN, against the CPU's operation.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.kernels.causal_conv_varlen import causal_conv_varlen
from isthmus.kernels.states import Int64, StateStep, causal_conv, state_view
from isthmus.memory import Group, state_spec

WIDTHS = [(4, 150), (2, 30), (7, 16)]


def lengths(width: int) -> list[int]:
    """Decodes, chunks shorter than what is kept, just as long and longer, and one of several programs."""
    return [*range(1, width + 3), 70, 1, *range(width + 2, 0, -1)]


class Both:
    """The same states on a device and as the CPU has them."""

    def __init__(self, device: str, sequences: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        group = Group("state", state_spec([("0.x", (3,), "bfloat16"), ("1.x", shape, name)]), "state")
        self.pages = np.random.default_rng(0).permutation(np.arange(1, sequences + 3))[:sequences]
        arena = torch.full(((sequences + 4) * group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
        there = arena.to(device, copy=True)
        self.device, self.other = device, state_view(there, group, "0.x")
        self.cpu, self.view = (state_view(x, group, "1.x") for x in (arena, there))

    def step(
        self, counts: Sequence[int], past: Int64, pages: Int64, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        """A step on both; x, weight and bias are the device's. Page 0: padding. Outputs (but for their rounding) and
        pages are as the CPU has them; where nothing was to be written there is NaN."""
        start = np.cumsum([0, *counts])
        owner = np.repeat(np.arange(len(counts)), counts)
        arrays = (pages, past == 0, start[:-1], start[1:] - 1, owner)
        where, new, first, last, whose = (torch.from_numpy(np.asarray(a)).to(self.device) for a in arrays)
        out = causal_conv_varlen(self.view, where, new, first, last, whose, x, weight, bias)
        nobody = len(self.cpu) - 1  # whose page takes what the CPU keeps of padding
        step = StateStep.of(start, past, np.where(pages == 0, nobody, pages))
        expected = causal_conv(step, self.cpu, x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
        self.cpu[nobody] = torch.nan
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out.cpu(), expected, rtol=torch.finfo(out.dtype).eps, atol=1e-5)
        torch.testing.assert_close(self.view.cpu(), self.cpu, rtol=0, atol=0, equal_nan=True)
        assert self.other.isnan().all()


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(("width", "channels"), WIDTHS)
def test_steps_of_everything(device: str, width: int, channels: int, bias: bool, dtype: torch.dtype) -> None:
    """Everybody begins, or goes on, or half of them do; then decodes alone."""
    torch.manual_seed(0)
    counts = lengths(width)
    both = Both(device, len(counts), (width - 1, channels), dtype)
    weight = torch.randn(channels, width, device=device).to(dtype)
    b = torch.randn(channels, device=device).to(dtype) if bias else None
    new, old = np.zeros(len(counts), np.int64), np.full(len(counts), 9)
    half = np.where(np.arange(len(counts)) % 2, old, new)
    for past, now in ((new, counts), (old, counts[::-1]), (half, counts), (old, [1] * len(counts))):
        x = torch.randn(sum(now), channels + 5, device=device).to(dtype)[:, :channels]  # a slice of a projection
        both.step(now, past, both.pages, x, weight, b)


def test_padding_reads_nothing_and_writes_nothing(device: str) -> None:
    """Chunks of nobody have the outputs of sequences that begin; the null page stays NaN."""
    torch.manual_seed(0)
    both = Both(device, 2, (3, 16), torch.float32)
    x, weight = torch.randn(10, 16, device=device), torch.randn(16, 4, device=device)
    both.step([3, 1], np.array([0, 0]), both.pages, x[:4], weight, None)
    pages = np.array([both.pages[0], 0, both.pages[1], 0])
    both.step([4, 3, 1, 2], np.array([3, 0, 1, 0]), pages, x, weight, None)


@pytest.mark.parametrize(("kept", "given"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_pages_of_another_precision(device: str, kept: torch.dtype, given: torch.dtype) -> None:
    """Whole numbers: Triton's interpreter rounds in its own way."""
    torch.manual_seed(0)
    both = Both(device, 3, (3, 16), kept)
    weight = torch.randn(16, 4, device=device).to(given)
    for past in (0, 9):
        x = torch.randint(-99, 99, (8, 16), device=device).to(given)
        both.step([5, 1, 2], np.full(3, past), both.pages, x, weight, None)
