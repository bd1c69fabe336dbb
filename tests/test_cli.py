"""The command line as a user meets it: text, JSON, the arena's map, and one clear line for what is wrong."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import refusal, run

pytestmark = pytest.mark.usefixtures("own_cache")

WORDS = " ".join(f"w{i}" for i in range(5))


SMALL = ("--dtype", "float32", "--pool-bytes", "1m", "--page-size", "4")


def test_one_prompt_streams_its_text(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", gguf, *SMALL, "--prompt", WORDS, "--temperature", 0, "--max-tokens", 9, "--ignore-eos") == 0
    streamed = capsys.readouterr().out
    assert (
        run(
            "generate", gguf, *SMALL, "--prompt", WORDS, "--temperature", 0, "--max-tokens", 9, "--ignore-eos", "--json"
        )
        == 0
    )
    whole = json.loads(capsys.readouterr().out)
    assert streamed == whole["outputs"][0]["text"] + "\n"
    assert len(whole["outputs"][0]["token_ids"]) == 9
    assert whole["outputs"][0]["finish_reason"] == "length"


def test_what_the_encoding_of_standard_output_lacks_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any verb: a model says what it likes, a table has its arrows."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1"))
    monkeypatch.setattr("isthmus.env.describe", lambda: {"device": "é 🙂", "packages": {}})
    assert run("env") == 0
    sys.stdout.flush()
    assert "é ?".encode("latin-1") in raw.getvalue()


def test_a_batch_with_map_and_static_split(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.txt").write_text(WORDS * 8)
    rows = [
        {"prompt": WORDS},
        {"prompt_file": "long.txt", "title": "long"},
        {"prompt_token_ids": [2, 5, 7], "max_tokens": 3},
    ]
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = run(
        "generate", gguf, *SMALL, "--prompts", tmp_path / "batch.jsonl", "--temperature", 0, "--max-tokens", 6,
        "--ignore-eos", "--map", "--compare-static",
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0
    assert captured.out.index(f"> {WORDS}") < captured.out.index("> long") < captured.out.index("> request 3")
    for part in ("unified arena", "static arena", "window", "full", "gap", "output tok/s"):
        assert part in captured.err
    table = captured.err[captured.err.index("group ") :].splitlines()[1:6]
    columns: dict[str, int] = {
        "window": 3,
        "full": 3,
        "gap": 1,
        "null": 1,
        "tail": 1,
    }  # of bytes; what follows are pages
    cells = [line.replace(",", "").split() for line in table]
    parts = sum(int(value) for row in cells for value in row[1 : 1 + columns[row[0]]])
    assert parts == 1 << 20, "live, cached, holes, gap, null and tail sum to the arena"


def test_prompts_from_standard_input(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(WORDS))
    assert run("generate", gguf, *SMALL, "--max-tokens", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] > 1


def test_settings_from_yaml_with_the_command_line_on_top(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(f"model: {gguf}\ndtype: float32\npool-bytes: 2m\npage_size: 8\n")
    assert (
        run(
            "generate",
            "--config",
            tmp_path / "x.yaml",
            "--pool-bytes",
            "1m",
            "--prompt",
            WORDS,
            "--max-tokens",
            2,
            "--map",
        )
        == 0
    )
    certificate = capsys.readouterr().err
    assert "1,048,576 bytes" in certificate
    assert "pages of 8 tokens" in certificate


def test_names_that_other_engines_use_are_accepted(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "generate", "--model-path", gguf, "--dtype", "float32", "--kv-cache-memory-bytes", "1m",
        "--context-length", "64",
        "--max-running-requests", 4, "--chunked-prefill-size", 32, "--prompt", WORDS, "--max-tokens", 2,
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err


BAD = {
    "no such file": (["nowhere.gguf"], "nowhere.gguf"),
    "a directory without a model": (["{tmp}"], "config.json"),
    "an unknown flag": (["{gguf}", "--pool-byte", "1m"], "--pool-byte"),
    "a size that does not parse": (["{gguf}", "--pool-bytes", "4x"], "'4x' is not a size"),
    "a pool smaller than one sequence": (["{gguf}", "--pool-bytes", "100"], "--pool-bytes"),
    "a context that does not fit": (["{gguf}", "--pool-bytes", "36k", "--max-model-len", "128"], "raise --pool-bytes"),
    "a context beyond the model's": (["{gguf}", "--max-model-len", "1m"], "--max-model-len"),
    "an impossible temperature": (["{gguf}", "--temperature", "-1"], "temperature"),
    "a missing prompts file": (["{gguf}", "--prompts", "none.txt"], "none.txt"),
    "an empty prompts file": (["{gguf}", "--prompts", "{tmp}/empty.txt"], "no prompts"),
    "a prompts line that is no JSON": (["{gguf}", "--prompts", "{tmp}/bad.jsonl"], "line 1"),
    "an unknown key in a prompts line": (["{gguf}", "--prompts", "{tmp}/key.jsonl"], "unknown key 'promt'"),
    "a missing config": (["{gguf}", "--config", "none.yaml"], "none.yaml"),
    "an unknown setting in YAML": (["{gguf}", "--config", "{tmp}/bad.yaml"], "pool_size"),
    "a YAML value of a wrong type": (["{gguf}", "--config", "{tmp}/type.yaml"], "page_size: 'abc' does not do"),
    "a YAML null": (["{gguf}", "--config", "{tmp}/null.yaml"], "page_size: None does not do"),
    "a YAML size that does not parse": (["{gguf}", "--config", "{tmp}/size.yaml"], "'4x' is not a size"),
    "a prompt that is no text": (["{gguf}", "--prompts", "{tmp}/five.jsonl"], "prompt must be text"),
    "token ids that are none": (["{gguf}", "--prompts", "{tmp}/ids.jsonl"], "a list of token ids"),
    "a comparison of static with static": (["{gguf}", "--memory", "static", "--compare-static"], "leave out"),
    "a truncated GGUF": (["{tmp}/cut.gguf"], "cut.gguf"),
    "a split without static memory": (["{gguf}", "--static-split", "full=0.5,window=0.5"], "--memory"),
    "a prompt that can never fit": (["{gguf}", "--pool-bytes", "36k", "--prompt", "w1 " * 40], "tokens"),
    "a device that is not here": (["{gguf}", "--device", "cuda"], "cuda"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line_and_exit_code_2(
    case: str, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text("{nope\n")
    (tmp_path / "key.jsonl").write_text('{"promt": "x"}\n')
    (tmp_path / "bad.yaml").write_text("pool_size: 1g\n")
    (tmp_path / "type.yaml").write_text("page_size: abc\n")
    (tmp_path / "null.yaml").write_text("page_size: null\n")
    (tmp_path / "size.yaml").write_text("pool_bytes: 4x\n")
    (tmp_path / "five.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": ["a"]}\n')
    shutil.copy(gguf, tmp_path / "cut.gguf")
    with (tmp_path / "cut.gguf").open("r+b") as file:
        file.truncate(gguf.stat().st_size // 2)
    args, named = BAD[case]
    filled = [arg.format(tmp=tmp_path, gguf=gguf) for arg in args]
    prompt = [] if {"--prompt", "--prompts"} & set(filled) else ["--prompt", WORDS]
    code = run("generate", *filled, "--dtype", "float32", *prompt)
    assert named in refusal(code, *capsys.readouterr())


def test_bench_memory_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "memory", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["decode_step_us"]["median"] > 0
    assert result["prefill_us"]["median"] > 0
    assert set(result["by_arena"]) == {"1_gb", "10_gb", "100_gb"}
    assert result["environment"]["packages"]["isthmus"]


def test_bench_throughput_prints_one_object(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.json").write_text(json.dumps({"prompt_token_ids": [[2, 5, 6, 7]] * 3}))
    code = run("bench", "throughput", gguf, *SMALL, "--workload", tmp_path / "w.json", "--output-len", 5, "--json")
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("output_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second"):
        assert result[name] > 0
    assert result["output_tokens"] == 15
    assert result["peak_rss_bytes"] > 1 << 20
    assert result["startup_seconds"] > 0
    assert len(result["samples"]) == 3
    (tmp_path / "w.json").write_text("[1, 2]")
    code = run("bench", "throughput", gguf, *SMALL, "--workload", tmp_path / "w.json")
    assert "w.json" in refusal(code, *capsys.readouterr())


def test_bench_split_compares_three_sides(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "bench", "split", gguf, "--dtype", "float32", "--page-size", 4, "--pool-bytes", "100k", "--long", "2,60,4",
        "--short", "6,9,4", "--repeat", 1, "--json",
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    assert set(result["sides"]) == {"unified", "static best", "static wrong"}
    assert all(sum(walls.values()) <= 100 * 1024 for walls in result["walls"].values())


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "--json") == 0
    assert json.loads(capsys.readouterr().out)["packages"]["torch"]
    assert run("env") == 0
    assert "torch" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from isthmus.cli import main; main(['generate', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--pool-bytes" in done.stdout
