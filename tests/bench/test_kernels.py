"""What `bench kernels` compares: every layout holds every row once, and without a GPU it says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from isthmus.bench.layouts import DTYPE, LAYOUTS, Heads, Layout, place
from isthmus.bench.precompile import compile_all
from tests.command import refusal, run


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_has_a_place_of_its_own(layout: Layout, page_size: int) -> None:
    heads = Heads("tiny", 2, 2, 16, 3)
    first, end = np.array([0, 5, 30]), np.array([9, 33, 50])
    arena = torch.zeros(64 << 10, dtype=torch.uint8)
    placed = place(arena, heads, layout, page_size, first, end)
    assert len(placed.layers) == 3
    rows = [
        part[placed.page_table[sequence, token // placed.page_size], token % placed.page_size]
        for layer in placed.layers
        for part in layer
        for sequence, (low, high) in enumerate(zip(first, end, strict=True))
        for token in range(low, high)
    ]
    assert len(rows) == 3 * 2 * 57
    for i, row in enumerate(rows):
        row[0], row[1] = i // 100, i % 100
    for i, row in enumerate(rows):  # one that shares bytes with another comes back wrong
        assert (row[0] == i // 100).all()
        assert (row[1] == i % 100).all()
    assert all(part.stride(0) * part.itemsize % 16 == 0 for layer in placed.layers for part in layer)


def test_fewer_layers_where_not_all_fit() -> None:
    heads = Heads("tiny", 1, 1, 16, 8)
    arena = torch.zeros(4 * heads.row_bytes * 33, dtype=torch.uint8)
    assert len(place(arena, heads, "page-major", 1, np.array([0]), np.array([32])).layers) == 4
    with pytest.raises(ValueError, match="do not fit"):
        place(arena, heads, "page-major", 1, np.array([0]), np.array([500]))
    assert DTYPE.itemsize == 2


def test_nothing_to_compile_starts_no_process() -> None:
    """`--only pages` has no attention kernels."""
    assert compile_all([], 1.0) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(run("bench", "kernels"), *capsys.readouterr())
    assert "bench kernels measures a GPU, and torch sees none here: run it on a machine with one" in line


@pytest.mark.parametrize("arguments", [("--only", "decodes"), ("--only", "pages", "--sweep")])
def test_sections_that_do_not_exist(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--only" in refusal(run("bench", "kernels", *arguments), *capsys.readouterr())


@pytest.mark.gpu
def test_page_kernels_and_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "kernels", "--only", "pages", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["copy_gb_per_s"] > 0
    assert {row["kernel"] for row in result["pages"]} == {"write_kv", "copy_pages", "scatter", "translate"}
    assert all(row["us"] > 0 for row in result["pages"])


@pytest.mark.gpu
def test_experts_and_their_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from isthmus.bench import expert_cases  # noqa: PLC0415 (Triton, which a CPU install may lack)

    monkeypatch.setattr(expert_cases, "SHAPES", (expert_cases.Shape("small", 8, 2, 256, 128),))
    assert run("bench", "kernels", "--only", "experts", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["experts"]
    assert [row["tokens"] for row in rows] == list(expert_cases.TOKENS)
    assert all(min(row["us"], row["grouped_mm_us"], row["tflops"]) > 0 for row in rows)
