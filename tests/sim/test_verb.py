"""The command `isthmus simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from isthmus.cli import main
from tests.command import refusal, run
from tests.conftest import shared_file
from tests.sim.conftest import STATES, WINDOWS, write

MIX = ("--synthetic", "10,600,20", "--synthetic", "20,32,20", "--rate", "200")


def test_every_side_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, out, plot = write(tmp_path, WINDOWS), tmp_path / "out.json", tmp_path / "out.svg"
    line = ["simulate", "--groups", str(groups), "--pool-bytes", "16m", *MIX, "--ttft-limit", "200",
            "--itl-limit", "50",
            "--static-split", "full=0.2,window=0.8", "--memory", "both", "--search-requests", "30",
            "--json", str(out), "--plot", str(plot)]  # fmt: skip
    assert main(line) == 0
    table = capsys.readouterr().out
    assert "goodput, requests/s" in table
    assert "walls of static best" in table
    result = json.loads(out.read_text())
    assert set(result["sides"]) == {"unified", "static best", "static given"}
    assert all(side["finished"] == 30 for side in result["sides"].values())
    assert result["limits"] == {"ttft": 0.2, "itl": 0.05}
    assert {trial["walls"]["full"] for trial in result["searches"]["static best"]} >= {
        result["sides"]["static best"]["walls"]["full"]
    }
    assert plot.read_text().lstrip().startswith("<?xml")


def test_a_png_is_one(tmp_path: Path) -> None:
    groups, plot = write(tmp_path, STATES), tmp_path / "out.png"
    line = [
        "simulate",
        "--groups",
        str(groups),
        "--pool-bytes",
        "64m",
        "--memory",
        "unified",
        *MIX,
        "--plot",
        str(plot),
    ]
    assert main(line) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_traces_that_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, out = write(tmp_path, STATES), tmp_path / "out.json"
    traces = [shared_file("azure_llm_2023_conv.csv"), shared_file("mooncake_conversation_trace.jsonl")]
    line = ["simulate", "--groups", str(groups), "--pool-bytes", "512m", "--memory", "static", "--phases",
            *(word for trace in traces for word in ("--trace", str(trace))), "--alternate", "5s", "--limit", "5",
            "--rate-scale", "10,1", "--search-requests", "4", "--json", str(out)]  # fmt: skip
    assert main(line) == 0
    result = json.loads(out.read_text())
    assert set(result["sides"]) == {"static best", "for azure_llm_2023", "for mooncake_conve"}
    assert result["workload"]["requests"] == 10
    assert [trace["requests"] for trace in result["sides"]["static best"]["by_trace"]] == [5, 5]


def test_a_preset_has_its_groups_and_its_arena(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    line = ["simulate", "gemma-3-1b", "--synthetic", "3,64,8", "--memory", "unified", "--json", str(out)]
    assert main(line) == 0
    result = json.loads(out.read_text())
    assert [(g["name"], g["page_bytes"], g["window"]) for g in result["groups"]] == [
        ("full", 65_536, None), ("window", 360_448, 512)
    ]  # fmt: skip
    assert result["shape"]["dense_bytes"] == 1_999_771_904, "as `bench step` counted them"
    assert 100e9 < result["arena_bytes"] < 150e9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--synthetic", "1,2,3"], "name a MODEL or give --groups FILE"),
        (["--groups", "G"], "give --pool-bytes"),
        (["--groups", "G", "--pool-bytes", "1g", "--trace", "none.csv"], "none.csv: no such file"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--trace", "x"], "one of the two"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--alternate", "5s"], "at least twice"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--phases"], "at least twice"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--rate-scale", "1,2"], "each of 1 traces"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--plot", "x.pdf"], "ends in .png or .svg"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--snapshots", "512"], "nothing to save"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--static-split", "full=1"], "each of"),
        (["--groups", "G", "--pool-bytes", "1g", "--synthetic", "1,2,3", "--machine", "abacus"], "one of h200, cpu"),
        (["--groups", "none.json", "--pool-bytes", "1g", "--synthetic", "1,2,3"], "none.json: no such file"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    groups = str(write(tmp_path, WINDOWS))
    words = [groups if word == "G" else word for word in words]
    if "--synthetic" not in words and "--trace" not in words:
        words += ["--synthetic", "1,2,3"]
    assert message in refusal(run("simulate", *words), *capsys.readouterr())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": []}, '"groups", a list of them'),
        ({"groups": [{"name": "a", "kind": "append"}]}, "group 0: page_bytes is missing"),
        ({"groups": [{"name": "a", "kind": "append", "page_bytes": 100}]}, "multiple of 16"),
        ({"groups": [{"name": "a", "kind": "append", "page_bytes": 16, "size": 1}]}, "unknown size"),
        ({"groups": [{"name": "a", "kind": "append", "page_bytes": 16}] * 2}, "its own name"),
        ({"shape": {"layers": 1}}, '"shape"'),
        ({"shape": {"layers": 1, "dense_bytes": 1, "token_flops": 1, "colour": 2}}, "colour"),
    ],
)
def test_a_file_of_groups_says_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], message: str
) -> None:
    groups = write(tmp_path, WINDOWS | change)
    code = run("simulate", "--groups", groups, "--pool-bytes", "1g", "--synthetic", "1,2,3")
    assert message in refusal(code, *capsys.readouterr())


def test_a_picture_without_its_package_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    groups = write(tmp_path, WINDOWS)
    code = run("simulate", "--groups", groups, "--pool-bytes", "1g", "--synthetic", "1,2,3", "--plot", "x.svg")
    assert "isthmus[plot]" in refusal(code, *capsys.readouterr())
