"""The rule by which states are saved, against fixed intervals, in chats."""

from __future__ import annotations

import json

import pytest

from isthmus.cli import main
from tests.command import refusal, run

CHATS = ["--conversations", "3", "--turns", "4", "--system", "70", "--user", "20", "--answer", "20"]


def test_chats_find_more_than_at_fixed_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts end anywhere; the last full page of each is where the next turn can start. (A tight interval also saves
    what is in the answers, and finds more in such short chats.)"""
    assert (
        main(["bench", "snapshots", "LFM2-1.2B", "--pool-bytes", "256m", *CHATS, "--intervals", "64,128", "--json"])
        == 0
    )
    rules = json.loads(capsys.readouterr().out)["rules"]
    sent = {rule["prompt_tokens"] for rule in rules.values()}
    assert len(sent) == 1
    engine, often, seldom = (rules[name]["cached_tokens"] for name in ("engine", "every 64", "every 128"))
    assert engine > often > seldom


def test_a_model_without_states_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code = run("bench", "snapshots", "gemma-3-270m", *CHATS)
    assert "gemma-3-270m keeps no states" in refusal(code, *capsys.readouterr())
