"""The squeeze, short: the real scheduler under both loads, its figures, and nothing left at the end."""

from __future__ import annotations

import json

import pytest

from isthmus import cli
from isthmus.bench import squeeze
from tests.command import refusal, run


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of each load in an arena that one long sequence nearly fills."""
    monkeypatch.setattr(squeeze, "PERIOD", 40)
    monkeypatch.setattr(squeeze, "SAMPLE", 10)
    monkeypatch.setattr(squeeze, "ARENA", 3 << 30)
    monkeypatch.setattr(squeeze, "LONG", ((2_000, 16_000), (8, 24)))


def test_the_shape_is_inklings() -> None:
    pages = {group.name: group.spec for group in squeeze.groups()}
    assert pages["full"].token_bytes == 11 * 8 * 2 * 128 * 2
    assert pages["window"].token_bytes == 55 * 16 * 2 * 128 * 2
    rows = 55 * (2 * 16 * 128 + 2 * 6144) + 11 * (2 * 8 * 128 + 2 * 6144)
    assert pages["state"].page_bytes == rows * 3 * 4
    assert len(pages["state"].parts) == 66 * 4


@pytest.mark.parametrize("caching", [False, True])
def test_the_float_is_squeezed_from_both_sides(caching: bool) -> None:
    result = squeeze.run(240, prefix_caching=caching)
    assert result["steps"] == 240
    assert result["checks"] == len(result["samples"]) == 24
    assert {sample["load"] for sample in result["samples"]} == {"short", "long"}
    groups = result["groups"]
    assert groups["state"]["share"]["most"] > 2 * groups["state"]["share"]["least"]
    assert groups["full"]["share"]["most"] > 0.4
    moved = sum(group["moved_pages"] * group["page_bytes"] for group in groups.values())
    assert result["moved_bytes"] == moved > 0
    assert result["moved_per_allocated"] == moved / result["allocated_bytes"] < (0.5 if caching else 0.1)
    assert bool(result["evicted_pages"]) == caching
    for sample in result["samples"]:
        assert sum(sample["live"].values()) + sample["holes"] + sample["gap"] <= squeeze.ARENA


def test_the_command_prints_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "squeeze", "--steps", "90", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["environment"]["commit"]
    assert cli.main(["bench", "squeeze", "--steps", "90", "--enable-prefix-caching"]) == 0
    assert "mean share of holes" in capsys.readouterr().out
    assert "--steps" in refusal(run("bench", "squeeze", "--steps", 0), *capsys.readouterr())
