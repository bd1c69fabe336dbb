"""The founding A/B: green on our memory, red on the founding bug, and clear about everything else that goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import refusal, run
from tests.conftest import shared_file
from tests.server.running import DEADLINE, until

PATH = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
"""So that servers find the tests' own programs."""

SMALL = ("--rounds", "2", "--shots", "1", "--questions", "12", "--concurrency", "4", "--output-len", "24")

Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def churn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The built-in shape in short: exit code and result."""
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def bench(*flags: object) -> tuple[int, dict[str, Any]]:
        data = shared_file("gsm8k_test.jsonl")
        code = run("bench", "ab", "churn", "--data", data, *SMALL, "--device", "cpu", "--json", *flags)
        return code, json.loads(capsys.readouterr().out)

    return bench


def test_the_sides_agree_though_churn_passes_the_windows_own_pages_in_the_first_round(churn: Bench) -> None:
    code, result = churn("--pool-bytes", "8m")
    assert code == 0, result["agreement"]
    assert result["agreement"]["compared"] == 24
    assert result["agreement"]["differ"] == 0
    assert result["alive"] == {"static": True, "unified": True}
    unified = next(server for server in result["servers"] if server["side"] == "unified")
    assert unified["ids"] > 9 * unified["own_pages"]["window"]
    assert all(sample["churn"] > 1 for sample in result["samples"])
    assert all(sample["kv_tokens"] > 0 and sample["output_tokens"] > 12 for sample in result["samples"])
    assert result["samples"][1]["cached_tokens"] > 0  # the second round finds the first one's pages
    assert result["command"] == sys.argv[1:]
    assert result["environment"]["packages"]["torch"]


def test_the_founding_bug_is_right_on_a_fresh_server_and_red_after_enough_churn(churn: Bench) -> None:
    faulty = f"{sys.executable} -m tests.server.faulty_server"
    flags = ("--pool-bytes", "56m", "--no-enable-prefix-caching", "--max-model-len", "2k")
    code, result = churn(*flags, "--server-command", faulty)
    fresh, churned = (s for s in result["samples"] if s["side"] == "unified")
    assert fresh["churn"] < 1 < churned["churn"]
    assert code == 1
    assert fresh["alive"]
    assert churned["alive"]
    assert "1.1" not in result["agreement"]["by_round"]
    assert result["agreement"]["by_round"]["1.2"] >= 3
    assert result["agreement"]["first"]["round"] == 2
    assert result["agreement"]["unsteady"]["static"] == 0


class Toy:
    """`bench ab` against the toy server."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.data = folder / "data.jsonl"
        names = ("shot", "first", "second", "third", "fourth")
        items = [{"question": f"the {name} is {name}ly", "answer": f"so\n#### {i:,}"} for i, name in enumerate(names)]
        self.data.write_text("\n".join(map(json.dumps, items)))

    def flags(self, how: str, *more: object) -> list[str]:
        """The command line."""
        program = f"{sys.executable} -m tests.server.toy_server {self.folder} {how}"
        flags = ["bench", "ab", "demo", "--data", self.data, "--server-command", program, "--shots", 1]
        return [str(flag) for flag in [*flags, "--questions", 4, "--rounds", 2, "--concurrency", 2, *more]]

    def run(self, how: str, *more: object) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        code = run(*self.flags(how, *more))
        return code, *self.capsys.readouterr()

    def started(self) -> list[tuple[str, int]]:
        """Side and pid of every server, in order."""
        lines = (self.folder / "started").read_text().splitlines()
        return [(line.split()[0], int(line.split()[1])) for line in lines]


@pytest.fixture
def toy(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setenv("PYTHONPATH", PATH)
    return Toy(tmp_path, capsys)


def test_a_fresh_server_for_every_side_and_the_order_turns(toy: Toy) -> None:
    code, out, _ = toy.run("well", "--repeat", 2, "--json")
    result = json.loads(out)
    assert code == 0
    assert [side for side, _ in toy.started()] == ["static", "unified", "unified", "static"]
    assert len({pid for _, pid in toy.started()}) == 4
    assert result["agreement"]["compared"] == 16
    assert [sample["kv_tokens"] for sample in result["samples"]] == [1234] * 8
    assert result["samples"][0]["churn"] == pytest.approx(
        4 * 21 / 16 / 10, abs=0.01
    )  # 20 + 1 tokens, 10 window pages of 16


def test_one_token_more_in_the_same_text_is_a_difference(toy: Toy) -> None:
    code, out, _ = toy.run("tokens")
    assert code == 1
    assert "8 of 8 pairs of answers DIFFER, the first in round 1, question 1, at character 7" in out


def test_the_first_difference_is_shown_with_both_texts(toy: Toy) -> None:
    code, out, _ = toy.run("text")
    assert code == 1
    assert "2 of 8 pairs of answers DIFFER, the first in round 1, question 3, at character 2" in out
    assert "static   1 tokens: 'thirdly'" in out
    assert "unified  1 tokens: 'th?'" in out


def test_a_side_that_dies_is_reported_with_its_last_words(toy: Toy) -> None:
    code, out, _ = toy.run("die", "--rounds", 3)
    assert code == 1
    dead = [line for line in out.splitlines() if "unified" in line and "NO" in line]
    assert len(dead) == 1
    assert dead[0].startswith("2 ")
    assert "last line of its log: IndexError: index 7 is out of bounds" in out


@pytest.mark.parametrize(
    ("how", "flags", "message"),
    [
        ("start", (), "the static server did not start: --device cuda: there is no GPU"),
        ("refuse", (), "question 1: the static server refuses it: HTTP 400: prompt: too long for this toy"),
        ("well", ("--memory", "static"), "bench ab runs static and unified memory itself: leave out --memory"),
        ("well", ("--questions", 5), "1 shots and 5 questions are due, the file has 5 items: lower --questions"),
        ("well", ("--data", "nowhere.jsonl"), "--data nowhere.jsonl: no such file or directory: name GSM8K's test"),
        ("well", ("--rounds", 0), "--repeat must be at least 1"),
        ("well", ("--server-command", "no-such-program"), "the static server did not start: no-such-program: No such"),
    ],
)
def test_what_cannot_be_is_one_line(toy: Toy, how: str, flags: tuple[object, ...], message: str) -> None:
    code, out, errors = toy.run(how, *flags)
    (line,) = (line for line in errors.splitlines(keepends=True) if "error" in line)
    assert message in refusal(code, out, line)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_stops_the_servers(toy: Toy) -> None:
    """The signal reaches the bench alone, as from a supervisor; the unified server is in the middle of an answer."""
    command = [sys.executable, "-m", "isthmus", *toy.flags("hang")]
    environment = os.environ | {"PYTHONPATH": PATH}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as bench:
        try:
            until(lambda: (toy.folder / "started").exists() and len(toy.started()) == 2)
            server = toy.started()[1][1]
            until((toy.folder / "asked").exists)
            bench.send_signal(signal.SIGINT)
            _, errors = bench.communicate(timeout=DEADLINE)
        finally:
            bench.kill()  # or the end of `with` would wait for it without a limit
    assert bench.returncode == 130
    assert errors.strip().endswith("isthmus: interrupted")
    assert not Path(f"/proc/{server}").exists()
