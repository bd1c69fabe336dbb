"""Prompts alone in parts: every figure is there, operations are exact, and what cannot run says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.bench.prefill import flops
from isthmus.memory import Group, opaque_spec
from isthmus.model.cost import ForwardCost
from tests.command import refusal, run

SMALL = ("--dtype", "float32", "--pool-bytes", "300k", "--page-size", "4", "--device", "cpu")


def test_all_figures_on_a_cpu(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("bench", "prefill", gguf, *SMALL, "--prompts", "2,24", "--prompts", "1,60", "--repeat", 3)
    assert run(*flags, "--max-num-batched-tokens", 32, "--max-num-seqs", 2, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(one["prompts"], one["tokens"], one["steps"]) for one in result["shapes"]] == [(2, 24, 2), (1, 60, 2)]
    for one in result["shapes"]:
        wall = one["wall_ms"]
        assert len(wall["samples"]) == 3
        tokens = one["prompts"] * one["tokens"]
        assert one["tokens_per_second"] == pytest.approx(1e3 * tokens / wall["median"], abs=0.06)
        computed, read = one["flops"] / result["matmul_flops_per_second"], 2 * result["weight_bytes"]
        floor = max(computed, read / result["copy_bytes_per_second"])
        assert one["floor_ms"] == pytest.approx(1e3 * floor, abs=1e-3)
        assert one["gpu"] is one["gpu_over_floor"] is None
    assert run(*flags) == 0
    assert "1        60" in capsys.readouterr().out


def test_operations_of_prompts() -> None:
    groups = [Group("full", opaque_spec(64, 4), "append"), Group("window", opaque_spec(64, 4), "window", 3)]
    cost = ForwardCost(2, 0, 0, 1, 1, 1000.0, 70.0, {"full": 2.0, "window": 5.0}, 4)
    assert flops(cost, groups, 1, 1) == 1000 + 70 + 2 + 5
    assert flops(cost, groups, 3, 5) == 3 * (5000 + 70 + 2 * (1 + 2 + 3 + 4 + 5) + 5 * (1 + 2 + 3 + 3 + 3))


BAD = {
    "no batches": (["--repeat", "0"], "--repeat"),
    "no tokens": (["--prompts", "3,0"], "--prompts"),
    "no pair": (["--prompts", "3"], "'3'"),
    "more prompts than rows": (["--prompts", "9,8", "--max-num-seqs", "4"], "--max-num-seqs"),
    "prompts beyond the model's": (["--prompts", "1,128"], "--max-model-len"),
    "more than the arena holds": (["--prompts", "40,60"], "raise --pool-bytes"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line(case: str, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = BAD[case]
    code = run("bench", "prefill", gguf, *SMALL, *arguments)
    assert named in refusal(code, *capsys.readouterr())
