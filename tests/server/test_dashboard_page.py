"""The dashboard in a real browser: Debian's chromium, driven by Playwright.

With ISTHMUS_SCREENSHOTS=MODEL the server runs that model, and `test_it_is_legible` leaves what it looks at in
docs/images:  ISTHMUS_SCREENSHOTS=demo python -m pytest tests/server/test_dashboard_page.py -k legible
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server.conftest import PLAIN
from tests.server.running import Server, serve, until

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MODEL = os.environ.get("ISTHMUS_SCREENSHOTS")
KEY = "secret"
PATIENCE = 60_000.0  # milliseconds; far more than anything takes
STARTS = (
    "The lighthouse keeper of the northern isle wrote every evening that",
    "At low tide the two seas drew back, and between them lay",
    "An old chart of the coast shows",
    "The ferry left the harbour before sunrise, because",
    "Salt marshes grow where",
)
"""Prompts of the traffic that tests look at."""

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("these tests drive Debian's chromium, which is not installed: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for a key."""
    flags = (*PLAIN, "--max-num-batched-tokens", "64") if MODEL is None else ("--pool-bytes", "40m")
    with serve(MODEL or folder, tmp_path_factory.mktemp("logs"), *flags, ISTHMUS_API_KEY=KEY) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture
def open_page(browser: Browser, guarded: Server) -> Iterator[Open]:
    """Opens the dashboard, with the key unless told otherwise; nothing may be asked of others or go wrong in it."""
    faults: list[str] = []
    asked: set[str] = set()
    with ExitStack() as stack:

        def open_page(key: str | None = KEY, **options: Any) -> Page:
            context = browser.new_context(**options)
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE)
            if key is not None:
                context.add_init_script(f"sessionStorage.setItem('isthmus-key', {json.dumps(key)})")
            page = context.new_page()
            page.on("request", lambda request: asked.add(request.url))
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
            page.goto(guarded.url)
            return page

        yield open_page
    refused = "status of (401|503)"  # the browser's own word on a wrong key, and on a server that is away
    assert [fault for fault in faults if not re.search(refused, fault)] == []
    assert [url for url in asked if not url.startswith(guarded.url + "/")] == []
    guarded.wait_idle()


@pytest.fixture(autouse=True)
def _patient() -> None:
    expect.set_options(timeout=PATIENCE)


@contextmanager
def traffic(server: Server) -> Iterator[None]:
    """Some requests have ended and left their prefixes, some that use those run."""

    def post(body: dict[str, Any]) -> None:
        server.http.post("/v1/completions", json={"temperature": 0.8, "seed": 1, "ignore_eos": True} | body)

    def run(index: int) -> None:
        body = {
            "prompt": 4 * STARTS[index] + " so",
            "max_tokens": 1900 - 100 * index,
            "ignore_eos": True,
            "stream": True,
        }
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if over:
                    return

    over: list[bool] = []
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(post, [{"prompt": 4 * text, "max_tokens": 48} for text in STARTS]))
        pool.map(run, range(len(STARTS)))
        try:
            until(server.pool, lambda pool: pool["running"] == len(STARTS))
            yield
        finally:
            over.append(True)


def serving(page: Page) -> Page:
    """It shows an engine that is there."""
    expect(page.locator("#state")).to_have_text("serving")
    expect(page.locator("#sum")).to_have_attribute("data-agrees", "true")
    return page


def answer(page: Page) -> str:
    """The newest answer's text."""
    return page.locator(".answer").last.text_content() or ""


def test_it_loads_and_asks_nobody_else(open_page: Open) -> None:
    page = serving(open_page())
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator(".chart canvas")).to_have_count(6)
    expect(page.locator("#served tbody")).to_have_text("Nothing runs.")
    names = page.locator("#figures tbody th").all_text_contents()
    assert names == ["window", "full", "gap", "null", "tail"]


def test_a_completion_streams_and_tells_its_cost(open_page: Open) -> None:
    page = serving(open_page())
    page.get_by_label("completion", exact=True).check()
    page.get_by_label("tokens", exact=True).fill("40")
    page.get_by_label("Prompt").fill("the cat sat on the mat")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Send").click()
    assert json.loads(sent.value.post_data or "")["prompt"] == "the cat sat on the mat"
    notes = page.locator(".notes").last
    expect(notes).to_contain_text(re.compile(r"output \d+ tokens.*fresh pages: window \d+, full \d+.*restorable"))
    assert answer(page)
    expect(page.locator("#ended tbody tr").first).to_contain_text("window")


def test_a_chat_remembers_and_can_be_stopped(open_page: Open, guarded: Server) -> None:
    page = serving(open_page())
    page.get_by_label("tokens", exact=True).fill("8")
    prompt = page.get_by_label("Prompt")
    prompt.fill("one")
    prompt.press("Enter")
    expect(page.locator(".notes").last).to_contain_text("output")
    first = answer(page)
    page.get_by_label("tokens", exact=True).fill("1900")
    prompt.fill("two")
    with page.expect_request("**/v1/chat/completions") as sent:
        prompt.press("Enter")
    assert json.loads(sent.value.post_data or "")["messages"] == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": first}, {"role": "user", "content": "two"},
    ]  # fmt: skip
    expect(page.locator(".answer").last).not_to_be_empty()  # while it still runs
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".notes").last).to_have_text("stopped")
    guarded.wait_idle()
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".entry")).to_have_count(0)


def test_the_map_sums_to_the_arena(open_page: Open, guarded: Server) -> None:
    """Part by part with the keys, and run by run inside a region, at one moment of a busy server."""
    page = serving(open_page())
    with traffic(guarded):
        expect(page.locator("#served tbody tr[data-state=running]")).to_have_count(len(STARTS))
        page.get_by_role("button", name="Pause").click()
        arena = page.get_by_role("slider")
        readout = page.locator("#readout")

        def told() -> tuple[str, int]:
            return readout.get_attribute("data-kind") or "", int(readout.get_attribute("data-bytes") or 0)

        arena.focus()
        arena.press("Home")
        kinds, total, edge = [], 0, -1
        while int(arena.get_attribute("aria-valuenow") or 0) != edge:
            edge = int(arena.get_attribute("aria-valuenow") or 0)
            kind, size = told()
            assert edge == total, "parts adjoin"
            kinds.append(kind)
            total += size
            if kind == "region":
                runs = 0
                arena.press("ArrowDown")
                start = -1
                while int(arena.get_attribute("aria-valuenow") or 0) != start:
                    start = int(arena.get_attribute("aria-valuenow") or 0)
                    runs += told()[1]
                    arena.press("ArrowDown")
                assert runs == size, "runs sum to their region"
            arena.press("ArrowRight")
        assert kinds == ["null", "region", "gap", "region"]
        assert total == guarded.pool()["arena_bytes"] == int(arena.get_attribute("aria-valuemax") or 0)
        cells = page.locator("#figures td[data-bytes]").evaluate_all("all => all.map(td => Number(td.dataset.bytes))")
        assert sum(cells) == total == int(page.locator("#sum").get_attribute("data-sum") or 0)
        assert page.locator("#served").get_by_text(STARTS[0]).count() == 0


def test_it_survives_the_engine_s_death(open_page: Open, guarded: Server) -> None:
    page = serving(open_page())
    page.get_by_label("completion", exact=True).check()
    page.get_by_label("tokens", exact=True).fill("1900")
    page.get_by_label("Prompt").fill("the cat")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer").last).not_to_be_empty()
    os.kill(guarded.engine_pid(), signal.SIGKILL)
    expect(page.locator("#state")).to_have_text("engine restarting")
    expect(page.locator(".notes .bad")).to_contain_text("SIGKILL")
    serving(page)
    expect(page.locator("body")).not_to_have_class(re.compile("stale"))
    page.get_by_label("tokens", exact=True).fill("3")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".notes").last).to_contain_text("output")


def test_it_comes_back_after_the_server_was_away(open_page: Open) -> None:
    page = open_page(None)
    expect(page.locator("#key-dialog")).to_be_visible()
    page.route("**/v1/pool/stream", lambda route: route.fulfill(status=503, json={"error": {"message": "no server"}}))
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#state")).to_have_text("no server: trying again")
    page.unroute("**/v1/pool/stream")
    serving(page)


def test_the_key_is_asked_for_and_kept_in_this_tab_alone(open_page: Open) -> None:
    page = open_page(None)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_contain_text("This server asks for a key.")
    page.get_by_label("Key", exact=True).fill("guess")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The server refuses this key.")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    serving(page)
    expect(dialog).to_be_hidden()
    kept = page.evaluate("[Object.values(sessionStorage).join(), Object.values(localStorage).join(), document.cookie]")
    assert kept[0] == KEY
    assert KEY not in kept[1] + kept[2] + page.url
    page.reload()
    serving(page)
    page.get_by_role("button", name="Forget key").click()
    expect(dialog).to_be_visible()


def test_everything_can_be_done_by_keyboard(open_page: Open) -> None:
    page = serving(open_page())
    seen: list[str] = []

    def tab_to(name: str) -> None:
        for _ in range(25):
            page.keyboard.press("Tab")
            found = page.evaluate(
                "[document.activeElement.id || document.activeElement.className,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            assert found[1] != "none", f"{found[0]} has focus and does not show it"
            seen.append(found[0])
            if found[0] == name:
                return
        raise AssertionError(f"{name} is not reached: {seen}")

    tab_to("skip")
    tab_to("theme")
    page.keyboard.press("Enter")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    tab_to("map")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_contain_text("full")
    tab_to("prompt")
    page.keyboard.type("the cat")
    tab_to("max-tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("5")
    page.keyboard.press("Enter")
    expect(page.locator(".notes").last).to_contain_text("output")
    expect(page.locator("#prompt")).to_be_focused()


SCREENS: dict[str, dict[str, Any]] = {
    "dark": {"color_scheme": "dark", "viewport": {"width": 1360, "height": 900}},
    "light": {"color_scheme": "light", "viewport": {"width": 1360, "height": 900}},
    "phone": {
        "color_scheme": "dark", "viewport": {"width": 360, "height": 1000}, "reduced_motion": "reduce",
        "device_scale_factor": 2,
    },
}  # fmt: skip

CONTRAST = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255);
  const light = ([r, g, b]) => [r, g, b].map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const ground = light(parse(getComputedStyle(document.querySelector(".card")).backgroundColor));
  const inks = [...document.querySelectorAll("h2, .readout, .hint, .legend, .pill, th, tbody td, dt, dd")]
    .map((element) => getComputedStyle(element).color);
  return [ground, Math.min(...inks.map((ink) => ratio(light(parse(ink)), ground)))];
}
"""
"""The luminance of a card, and the least contrast of text on it."""


@pytest.mark.parametrize("screen", SCREENS)
def test_it_is_legible(open_page: Open, guarded: Server, screen: str) -> None:
    """Dark and light, wide and at 360 pixels: nothing runs out of the screen, and text stands out from its ground."""
    options = SCREENS[screen]
    page = serving(open_page(**options))
    width = options["viewport"]["width"]
    with traffic(guarded):
        expect(page.locator("#served tbody tr[data-state=running]")).to_have_count(len(STARTS))
        if MODEL is not None:
            take_picture(page, screen)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5"
            " && !e.closest('.hidden, thead')).map((e) => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        ground, contrast = page.evaluate(CONTRAST)
        assert (ground > 0.5) == (options["color_scheme"] == "light")
        assert contrast >= 4.5
        if "reduced_motion" in options:
            page.locator("#state").evaluate("pill => (pill.dataset.state = 'restarting')")
            assert (
                page.evaluate("getComputedStyle(document.querySelector('#state'), '::before').animationName") == "none"
            )


def test_a_theme_that_was_chosen_wins_and_stays(open_page: Open) -> None:
    page = serving(open_page(color_scheme="dark"))
    assert page.evaluate(CONTRAST)[0] < 0.5
    page.get_by_role("button", name="Theme: auto").click()
    assert page.evaluate(CONTRAST)[0] > 0.5
    page.reload()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert page.evaluate(CONTRAST)[0] > 0.5


def take_picture(page: Page, name: str) -> None:
    """What the page looks like after a question was answered and the charts have something to show."""
    page.get_by_label("Prompt").fill("An isthmus is a narrow strip of land")
    page.get_by_label("tokens", exact=True).fill("80")
    page.get_by_label("temperature").fill("0")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".notes").last).to_contain_text("output")
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0), (document.getElementById('log').scrollTop = 0)")
    IMAGES.mkdir(exist_ok=True)
    page.screenshot(path=IMAGES / f"dashboard-{name}.png", full_page=name != "phone", animations="disabled")
