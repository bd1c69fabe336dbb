"""The page: one file of bounded size that needs nothing, and shows in a browser what the pool was."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.memory import Replay
from isthmus.memory.records import Code
from isthmus.replay import page
from tests.replay.lives import timeline_of, write_life

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("life") / "a&b.journal"
    write_life(path)
    return path


@pytest.fixture(scope="module")
def file(journal: Path) -> Path:
    path = journal.with_suffix(".html")
    page.write(timeline_of(journal), ["what <happened>"], path)
    return path


def test_it_is_one_file_that_fetches_nothing(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"(src|href)\s*=|url\(|https?://|@import|fetch\(", text)
    assert "<!--" not in text
    assert "what &lt;happened&gt;" in text
    assert "a&amp;b.journal: the arena over time" in text


def test_it_stays_small(journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are merged until the page fits."""
    timeline = timeline_of(journal)
    whole, frames = len(page.render(timeline, [])), len(timeline.frames)
    monkeypatch.setattr(page, "MOST_BYTES", whole - 2000)
    page.write(timeline, [], tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size <= whole - 2000
    assert 3 <= len(timeline.frames) < frames


def test_names_beyond_a_limit_are_counted(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = timeline_of(journal)
    monkeypatch.setattr(page, "MOST_NAMES", 200)
    text = page.render(timeline, [])
    left_out = int(re.search(r'"namesLeftOut":(\d+)', text)[1])  # type: ignore[index]
    assert 0 < left_out == len(timeline.names) - text.count("request-")


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.fail("these tests drive Debian's chromium, which is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any, file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, drawn; any error in it fails the test."""
    width, scheme = getattr(request, "param", (1000, "light"))
    errors: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-ready=yes]")
    yield tab
    tab.close()
    assert not errors


def test_pages_tell_whose_they_are_at_any_moment(tab: Any, journal: Path) -> None:
    """Every page of the strip, by keyboard, at some moments, against the pool itself."""
    for step in (7, 33, 59, 20):
        tab.focus("#moment")
        tab.evaluate("step => show(Array.from(frames.step).indexOf(step))", step)
        assert tab.inner_text("#now").startswith(f"Step {step}, ")
        told = set()
        tab.focus("#map")
        tab.evaluate("picked = null")
        while True:
            tab.keyboard.press("ArrowRight")
            if tab.inner_text("#what") in told:
                break
            told.add(tab.inner_text("#what"))
        assert {re.sub(r", since.*", "", text) for text in told} == pages_at(journal, step)


def pages_at(journal: Path, step: int) -> set[str]:
    life, due, found = Replay(journal), False, set()
    for event in life:
        due = due or (event.code is Code.STEP and life.step == step)
        if not due or not life.settled:
            continue
        for name, region in life.pool.regions.items():
            for at in range(region.lo, region.hi):
                page_id = int(region.owner[at])
                owner = life.owners.name_of(life.pool.groups[name].space, page_id).removesuffix(" (runs no more)")
                found.add(f"{name} page {at}: " + (f"id {page_id}, {owner}" if page_id else "a hole"))
        return found
    raise AssertionError("no such step")


def test_the_table_is_the_pool_behind_the_last_step(tab: Any, journal: Path) -> None:
    tab.focus("#time")
    tab.keyboard.press("End")
    life = Replay(journal)
    for _ in life:
        pass
    rows = [row.split("\t")[:4] for row in tab.inner_text("#groups").splitlines()]
    assert rows == [
        [name, f"{r.live * r.page_bytes:,}", f"{len(r.holes):,}", f"{r.live:,}"]
        for name, r in life.pool.regions.items()
    ]


def test_the_moment_follows_keys_slider_and_pointer(tab: Any) -> None:
    tab.focus("#time")
    tab.keyboard.press("Home")
    assert tab.inner_text("#now").startswith("Step 0,")
    tab.keyboard.press("Shift+ArrowRight")
    assert tab.inner_text("#now").startswith("Step 10,")
    tab.focus("#moment")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#now").startswith("Step 11,")
    box = tab.locator("#time").bounding_box()
    tab.mouse.click(box["x"] + box["width"] - 2, box["y"] + 50)
    assert re.match(r"Step (59|60),", tab.inner_text("#now"))
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    assert re.match(r"Step \d+: ", tab.inner_text("#what"))
    tab.check("input[value=ms]")
    assert re.match(r"Step (59|60),", tab.inner_text("#now"))


@pytest.mark.parametrize("tab", [(360, "dark"), (360, "light"), (1200, "dark")], indirect=True)
def test_it_fits_narrow_screens_and_both_themes(tab: Any) -> None:
    width = tab.viewport_size["width"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    inside, around = tab.evaluate(
        """() => { const t = document.getElementById("time"), pen = t.getContext("2d");
        const at = (x, y) => Array.from(pen.getImageData(x, y, 1, 1).data.slice(0, 3)).join();
        const seen = new Set();
        for (let y = 2; y < 200; y += 3) for (let x = 60; x < t.width; x += 7) seen.add(at(x, y));
        return [Array.from(seen), getComputedStyle(document.body).backgroundColor]; }"""
    )
    assert around == (
        "rgb(20, 23, 27)"
        if tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        else "rgb(255, 255, 255)"
    )
    own = tab.evaluate("groups.map((_, i) => rgb(colours.groups[i]).join())")
    assert set(own) <= set(inside)
