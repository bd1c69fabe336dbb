"""Attention over the layouts that are compared: the same rows, so the same result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from isthmus.bench.attention_cases import Case, Decode, Launches, Prefill, launches
from isthmus.bench.layouts import DTYPE, LAYOUTS, Heads
from isthmus.bench.precompile import build_of
from isthmus.kernels.attention import DecodeConfig, PrefillConfig

HEADS = Heads("tiny", 2, 2, 16, 3)
NARROW = dataclasses.replace(HEADS, rows=torch.float8_e4m3fn)
PAGED = {Decode: (2, 3, 4), Prefill: (4, 5, 6)}  # arguments of a launch: key pages, value pages, page table


def fill(case: Case, work: Launches, cached: int, rows: Tensor) -> None:
    """Put `rows [layer, k|v, sequence, token, head, dim]` where the case reads them."""
    for launch, mine in zip(work, rows, strict=True):
        key_pages, value_pages, table = (launch.args[i] for i in PAGED[type(case)])  # type: ignore[attr-defined]
        size = key_pages.shape[1]
        for sequence in range(case.sequences):
            for token in range(max(0, cached - (case.window or cached)), cached):
                page = table[sequence, token // size]
                key_pages[page, token % size] = mine[0, sequence, token]
                value_pages[page, token % size] = mine[1, sequence, token]


@pytest.mark.parametrize(
    ("case", "cached"),
    [
        (Decode(HEADS, 2, 41, page_size=4), 41),
        (Decode(HEADS, 2, 41, window=10, page_size=4, config=DecodeConfig(16, 4, 2), programs=1), 41),
        (Decode(NARROW, 2, 41, page_size=4), 41),
        (Prefill(HEADS, 2, 6, past=23, page_size=4), 23),
        (Prefill(HEADS, 2, 6, past=23, window=9, page_size=4, config=PrefillConfig(16, 16, 4, 2)), 23),
    ],
    ids=("decode", "windowed decode", "fp8 decode", "prefill", "windowed prefill"),
)
def test_every_layout_gives_the_same(case: Case, cached: int, device: str) -> None:
    arena = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    rows = torch.randn(3, 2, 2, cached, HEADS.kv_heads, HEADS.dim).to(DTYPE)
    found = []
    for layout in LAYOUTS:
        torch.manual_seed(0)  # of the queries
        work = launches(dataclasses.replace(case, layout=layout), arena, 4)
        assert len(work) == 3, "one launch for each layer"
        fill(case, work, cached, rows)
        for launch in work:
            launch()
        found.append(torch.stack([launch.args[1].clone() for launch in work]))  # type: ignore[attr-defined]
        arena.fill_(0xFF)  # NaN: the next layout must not find rows of this one
    assert found[0].isfinite().all()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_turn_behind_a_long_conversation_is_cut(device: str) -> None:
    """What is timed with tiles in parts and with whole ones is the same work."""
    arena = torch.randn(1 << 19).to(DTYPE).to(device).view(torch.uint8)
    found = []
    for split in (True, False):
        torch.manual_seed(0)
        launch = launches(Prefill(HEADS, 1, 6, past=700, split=split), arena, 4)[0]
        launch()
        _, out, *_, plan, _, _ = launch.args  # type: ignore[attr-defined]
        assert (plan.slots > 0) == split
        found.append(out)
    torch.testing.assert_close(*found, atol=2e-3, rtol=2e-2)


def test_bytes_and_operations() -> None:
    assert Decode(HEADS, 3, 40, window=10).kv_bytes == 3 * 10 * 2 * 2 * 16 * 2
    assert Decode(HEADS, 3, 40).kv_bytes == 3 * 40 * 2 * 2 * 16 * 2
    assert Decode(NARROW, 3, 40).kv_bytes == 3 * 40 * 2 * 2 * 16
    assert Prefill(HEADS, 2, 4, past=5).operations == 2 * (6 + 7 + 8 + 9) * 4 * 4 * 16
    assert Prefill(HEADS, 2, 4, past=1, window=3).operations == 2 * (2 + 3 + 3 + 3) * 4 * 4 * 16
    assert Prefill(HEADS, 2, 4, past=9).kv_bytes == 2 * 9 * 2 * 2 * 16 * 2
    assert Prefill(HEADS, 2, 4, past=9, window=3).kv_bytes == 2 * 2 * 2 * 2 * 16 * 2


def test_cases_that_share_a_kernel_are_compiled_once() -> None:
    long, short = Decode(HEADS, 16, 32_768), Decode(HEADS, 256, 2000, window=512, layout="layer buffers", programs=4)
    assert build_of(long) == build_of(short)
    assert build_of(long) != build_of(dataclasses.replace(long, page_size=32))
    assert build_of(long) != build_of(dataclasses.replace(long, layout="token-major"))
    assert build_of(long) != build_of(dataclasses.replace(long, config=DecodeConfig(16, 4, 2)))
    chunk = Prefill(HEADS, 4, 2048)
    assert build_of(chunk) == build_of(dataclasses.replace(chunk, past=6144, sequences=1))
    assert build_of(chunk) != build_of(dataclasses.replace(chunk, window=512))
