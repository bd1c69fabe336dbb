"""The benches that need a server or chats, in their short form, on a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.bench.load import Answer, Ask, Target, closed_loop
from isthmus.bench.serve import summary
from isthmus.bench.soak import _growth, _wrong
from tests.command import run
from tests.model.tiny_gguf import tiny_model, write_gguf
from tests.server.running import Server

SMALL = ("--dtype", "float32", "--pool-bytes", "300k", "--page-size", "4")


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "gemma3", tiny_model("gemma3", max_position_embeddings=512))
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return path


def test_soak_in_short(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients vanish, the arena is too small for all: survivors get their tokens, and every byte comes back."""
    code = run(
        "bench", "soak", gguf, *SMALL, "--rounds", 3, "--concurrency", 48, "--hang-up", 0.25, "--prompt-len", 20,
        "--output-len", 12, "--json",
    )  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    assert result["requests"] == 144
    assert result["hung_up"] > 5
    assert result["failed"] == result["live_bytes_left"] == 0


def test_chats_in_short(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "bench", "chats", gguf, "--dtype", "float32", "--pool-bytes", "4m", "--page-size", 4, "--conversations", 3,
        "--turns", 4, "--system", 40, "--user", 6, "--answer", 5, "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["hit_tokens"] > result["prompt_tokens"] // 2
    assert all(turn["cached_tokens"] == 0 for turn in result["sides"]["cold"])


@pytest.mark.parametrize("loop", [("--concurrency", 4), ("--rate", 200)])
def test_serve_bench_against_a_server(
    server: Server, loop: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        "bench", "serve", "--url", server.url, *loop, "--requests", 12, "--prompt-len", 8, "--output-len", 6,
        "--hang-up", 0.2, "--ttft-limit", 60_000, "--json",
    )  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    assert result["complete"] + result["hung_up"] == 12
    assert result["goodput_requests_per_second"] == result["requests_per_second"] > 0


def test_256_streams_at_once_of_which_one_in_ten_hangs_up(server: Server) -> None:
    """Every survivor gets the very tokens that it gets without company, and one end."""
    rng = np.random.default_rng(0)
    asks = [
        Ask(rng.integers(3, 250, rng.integers(1, 60)).tolist(), 4 * int(rng.integers(1, 7)), hang_up, is_counted=True)
        for hang_up in [None] * 230 + [1] * 13 + [3] * 13
    ]
    rng.shuffle(asks)
    answers = asyncio.run(closed_loop(Target(server.url, "tiny"), asks, len(asks), lambda answer: None))
    assert server.wait_idle()["ids"]["live"] > 0, "the rest is cached"
    assert sum(value for name, value in server.metrics().items() if 'state="live"' in name) == 0
    alone: dict[int, str] = {}
    for length in {ask.output_len for ask in asks}:
        same = [i for i, ask in enumerate(asks) if ask.output_len == length]
        body = {"prompt": [asks[i].prompt for i in same], "max_tokens": length, "temperature": 0, "ignore_eos": True}
        choices = server.http.post("/v1/completions", json=body).json()["choices"]
        alone |= {i: choice["text"] for i, choice in zip(same, choices, strict=True)}
    assert all(answer.hung_up for ask, answer in zip(asks, answers, strict=True) if ask.hang_up_after == 1)
    for i, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        assert answer.error is None
        if not answer.hung_up:
            assert (answer.done, answer.tokens, answer.received) == (1, ask.output_len, ask.output_len)
            assert answer.text == alone[i]


def test_a_summary_counts_what_went_wrong() -> None:
    good = Answer(0.0, pieces=[0.1, 0.2], end=0.2, tokens=2, done=1)
    slow = Answer(0.0, pieces=[0.9, 1.0], end=1.0, tokens=2, done=1)
    broken = Answer(0.0, pieces=[0.1], end=0.3, error="HTTP 500")
    result = summary([good, slow, broken], seconds=2.0, ttft_limit=500.0)
    assert (result["complete"], result["failed"], result["errors"]) == (2, 1, ["HTTP 500"])
    assert result["goodput_requests_per_second"] == 0.5
    assert result["ttft_ms"]["p50"] == 500.0


def test_a_soak_notices_missing_tokens_and_ends() -> None:
    ask = Ask([1], 3)
    assert _wrong(ask, Answer(0.0, tokens=3, received=3, done=1)) is None
    assert _wrong(ask, Answer(0.0, tokens=2, received=2, done=1)) == "2 tokens instead of 3"
    assert _wrong(ask, Answer(0.0, tokens=3, received=2, done=1)) == "2 tokens received instead of 3"
    assert _wrong(ask, Answer(0.0, tokens=3, received=3, done=2)) == "2 times [DONE]"
    assert _wrong(ask, Answer(0.0, tokens=1, hung_up=True)) is None


def test_growth_is_that_of_each_process_without_the_arena() -> None:
    """The arena fills with cached prefixes, and that is no leak."""
    rounds = [
        {"resident_bytes": {"front": front, "engine": engine}, "arena_bytes": arena}
        for front, engine, arena in ((90, 500, 50), (100, 1100, 100), (150, 1300, 200), (110, 1400, 300))
    ]
    assert _growth(rounds) == {"front": 1.1, "engine": 1.1}
