"""Made-up workloads, and unified memory against the best walls for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.bench.by_step import typical
from isthmus.bench.throughput import synthetic
from isthmus.bench.walls import best_walls
from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.dryrun import dry_steps
from isthmus.errors import ConfigError
from isthmus.memory import Group, Pool, opaque_spec
from tests.command import refusal, run

SMALL = ("--dtype", "float32", "--pool-bytes", "100k", "--page-size", "4")


def test_a_workload_is_the_same_every_time_and_mixed() -> None:
    shapes = [(8, 40, 5), (24, 10, 7)]
    batch = synthetic(shapes, 1000)
    assert batch == synthetic(shapes, 1000)
    sizes = [(len(prompt), output) for prompt, output in batch]
    assert sorted(sizes) == [(10, 7)] * 24 + [(40, 5)] * 8
    assert sizes.count((40, 5)) > sizes[:16].count((40, 5)) > 0, "long requests come all over, not in a row"
    prompts = [tuple(prompt) for prompt, _ in batch]
    assert len(set(prompts)) == len(prompts), "equal prompts would be served by the prefix cache"
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_steps_by_kind_account_for_the_run(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("bench", "throughput", gguf, *SMALL, "--synthetic", "3,40,6", "--repeat", 2, "--by-step")
    assert run(*flags, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    for sample in result["samples"]:
        rows = {row["kind"]: row for row in sample["by_step"]}
        assert set(rows) == {"decodes", "prompts"}
        assert sum(row["steps"] for row in rows.values()) == sample["steps"]
        assert sum(row["steps"] * row["tokens"] for row in rows.values()) == 3 * (40 + 6 - 1)
        assert rows["decodes"]["tokens"] == rows["decodes"]["sequences"]
        assert rows["prompts"]["tokens"] > rows["prompts"]["sequences"]
        spent = sum(row["device_seconds"] + row["idle_seconds"] for row in rows.values())
        assert 0 < spent <= sample["seconds"]
        assert all(row[f"{part}_ms"] > 0 for row in rows.values() for part in ("schedule", "launch", "settle"))
    assert all(len(sample["step_ms"]) == sample["steps"] for sample in result["samples"])
    spent = [sum(sample["step_ms"]) for sample in result["samples"]]
    assert min(spent) <= 1e3 * result["typical_seconds"] <= max(spent)
    assert result["by_step"] in [sample["by_step"] for sample in result["samples"]]
    assert run(*flags) == 0
    assert (
        len([line for line in capsys.readouterr().out.splitlines() if line.startswith(("decodes ", "prompts "))]) == 2
    )


def test_synthetic_against_static(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "bench", "throughput", gguf, *SMALL, "--synthetic", "2,60,4", "--synthetic", "6,9,3", "--against-static",
        "--repeat", 2, "--json",
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    result = json.loads(captured.out)
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (8, 174, 26)
    assert set(result["sides"]) == {"unified", "static"}
    for side in result["sides"].values():
        assert len(side["samples"]) == 2
        assert 0 < side["mean_running"] <= side["most_running"] <= 8
        assert side["steps"] >= 4
    assert sum(result["walls"].values()) <= 100 * 1024
    rates = [result["sides"][name]["output_tokens_per_second"] for name in ("unified", "static")]
    assert result["unified_over_static"] == pytest.approx(rates[0] / rates[1], abs=1e-3)
    assert result["samples"] == result["sides"]["unified"]["samples"]
    assert result["unified_over_static_typical"] is None, "it takes the times of steps"


def test_a_typical_run_has_no_step_that_went_wrong_once() -> None:
    runs = [{"step_tokens": [8, 2, 2], "step_ms": times} for times in ([4, 1, 9], [4, 7, 1], [8, 1, 1])]
    assert typical(runs) == pytest.approx(0.006)
    assert typical([*runs, {"step_tokens": [8, 2], "step_ms": [4, 1]}]) is None
    assert typical([*runs, {"step_tokens": [8, 4, 2], "step_ms": [4, 1, 1]}]) is None


def test_sides_are_compared_by_their_steps(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("bench", "throughput", gguf, *SMALL, "--synthetic", "2,30,4", "--against-static", "--by-step")
    assert run(*flags, "--repeat", 2, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    seconds = [result["sides"][name]["typical_seconds"] for name in ("static", "unified")]
    assert result["unified_over_static_typical"] == pytest.approx(seconds[0] / seconds[1], rel=1e-2)
    assert run(*flags, "--repeat", 1) == 0
    printed = capsys.readouterr().out
    assert printed.count("typical seconds  ") == 2
    assert "by typical seconds; walls" in printed


BAD = {
    "no workload": ([], "--workload"),
    "two kinds of workload": (["--workload", "x.json", "--synthetic", "1,2,3"], "not allowed"),
    "a workload that is no triple": (["--synthetic", "1,2"], "'1,2'"),
    "an empty prompt": (["--synthetic", "1,0,3"], "--synthetic"),
    "static against static": (["--synthetic", "1,2,3", "--against-static", "--memory", "static"], "leave out --memory"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line(case: str, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = BAD[case]
    code = run("bench", "throughput", gguf, *SMALL, *arguments)
    assert named in refusal(code, *capsys.readouterr())


def test_walls_are_moved_to_where_the_batch_is_fastest() -> None:
    """The mean over the requests' time is a good guess, but not the best: what it takes at once counts too."""
    groups = (
        Group("full", opaque_spec(1024, 4), "append"),
        Group("window", opaque_spec(4096, 4), "window", 8),
    )
    config, arena = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64), 150_000
    lengths = [(100, 2)] * 8 + [(8, 40)] * 30
    guess = capacity.best_walls(groups, arena, lengths)
    found = best_walls(groups, arena, config, lengths)
    assert found.unified_steps < found.steps < dry_steps(Pool(arena, groups, walls=guess), config, lengths)
    assert found.steps == dry_steps(Pool(arena, groups, walls=found.walls), config, lengths)
    assert sum(found.walls.values()) <= arena
    with pytest.raises(ConfigError, match="one kind of cache"):
        best_walls(groups[:1], arena, config, lengths)
