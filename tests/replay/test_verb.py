"""`isthmus replay` as a user meets it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.memory.region import Region
from isthmus.replay import palette, picture
from tests import command
from tests.command import refusal
from tests.replay.lives import timeline_of, write_life


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("life") / "a.journal"
    write_life(path)
    return path


def run(*args: object) -> int:
    return command.run("replay", *args)


def test_it_says_what_happened(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = write_life(journal.with_name("twin"))
    assert run(journal) == 0
    text = capsys.readouterr().out
    assert "model tiny, device cpu" in text
    assert "steps 1 to 60" in text
    assert f"{pool.refusals} refused" in text
    for name, n in pool.moved_pages.items():
        assert f"{name} {n * pool.groups[name].spec.page_bytes:,}" in text
    assert "every outcome is as recorded; all equations hold (checked after every record)" in text
    assert run(journal, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["refusals"] == pool.refusals
    assert told["steps"] == [1, 60]
    assert told["divergence"] is None
    assert sum(peak["bytes"] for peak in told["peak_bytes"].values()) >= told["fullest"]["live_bytes"] > 0


def test_a_divergence_is_named_and_ends_with_1(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An isthmus that chooses other pages; what came before is drawn all the same."""
    take, calls = Region.take, 0

    def other(region: Region, n: int, lo: int, hi: int) -> Any:
        nonlocal calls
        calls += 1
        pages = take(region, n, lo, hi)
        return pages[::-1] if calls > 40 and n > 1 else pages

    monkeypatch.setattr(Region, "take", other)
    assert run(journal, "--html", tmp_path / "x.html", "--png", tmp_path / "x.png") == 1
    error = capsys.readouterr().err
    assert error.startswith("isthmus: first divergence: ")
    assert f"{journal}: record " in error
    assert "(commit), step " in error
    assert "recorded" in error
    assert len(error.splitlines()) == 1
    assert (tmp_path / "x.html").stat().st_size > 10_000
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_an_equation_that_does_not_hold_is_a_divergence_too(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(region: Region) -> None:
        assert region.name != "full" or region.live < 20, "a page is lost"

    monkeypatch.setattr(Region, "check", check)
    assert run(journal, "--json") == 1
    out, error = capsys.readouterr()
    assert "(commit), step " in error
    assert error.endswith("an equation does not hold: a page is lost\n")
    assert json.loads(out)["divergence"] in error


@pytest.mark.parametrize("content", [None, b"", b"GGUF"])
def test_what_is_no_journal_ends_with_2(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    line = refusal(run(tmp_path / "x"), *capsys.readouterr())
    assert line.startswith(f"isthmus: error: {tmp_path / 'x'}: ")


def test_no_framework_is_needed(journal: Path) -> None:
    script = (
        "import sys; from isthmus.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, "replay", str(journal)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# -- the picture -------------------------------------------------------------------------------------------------------


def decode(data: bytes) -> np.ndarray:
    """The pixels of an RGB file without filters."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, size = 8, b"", (0, 0)
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(kind + content)
        if kind == b"IHDR":
            size = struct.unpack(">II", content[:8])
        body += content if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(size[1], 1 + 3 * size[0])
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(size[1], size[0], 3)


def test_the_picture_shows_each_group_as_large_as_it_was(journal: Path, tmp_path: Path) -> None:
    assert run(journal, "--png", tmp_path / "x.png") == 0
    pixels = decode((tmp_path / "x.png").read_bytes())
    assert pixels.shape == (picture.HEIGHT, picture.WIDTH, 3)
    timeline = timeline_of(journal)
    pool = timeline.life.pool
    image = picture.arena(timeline, 960)
    for column, frame in enumerate(timeline.frames):
        for i, name in enumerate(timeline.groups):
            size = pool.groups[name].spec.page_bytes
            shown = (image[:, column] == palette.rgb(palette.GROUPS[i])).all(axis=1).sum() / 960 * pool.arena_bytes
            assert abs(shown - frame.live[i] * size) <= 2 * size
    for colour in palette.GROUPS[:3]:
        drawn = (pixels[picture.TOP : picture.TOP + picture.MAP] == palette.rgb(colour)).all(axis=2)
        assert drawn[:, picture.LEFT : -picture.RIGHT].sum() > 1000


def test_a_place_that_cannot_be_written_is_one_line(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(run(journal, "--png", "/none/x.png"), *capsys.readouterr())
    assert line == "isthmus: error: --png /none/x.png: no such file or directory\n"
