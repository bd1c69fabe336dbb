"""`isthmus top` as its user meets it: a picture that sums, one line for what is wrong, and a server that comes back."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from itertools import islice
from typing import Any

import pytest

from isthmus.cli import main
from isthmus.top_parts import parts_of, strip
from isthmus.top_screen import Screen
from isthmus.top_stream import pairs, watch
from tests.command import refusal, run

PAGE = 100


def group(name: str, frontiers: tuple[int, int], live: int, cached: int, hole: int) -> dict[str, Any]:
    pages = {"live": live, "cached": cached, "hole": hole}
    sizes = {state: n * PAGE for state, n in pages.items()}
    return {"name": name, "page_bytes": PAGE, "bytes": sizes, "frontiers": frontiers, "moved_bytes": 0}


def frame(time: float = 0.0, **changes: Any) -> dict[str, Any]:
    """An arena of 4,000 bytes: null, six pages of `low`, a gap, nine of `high`, tail."""
    pool = {
        "arena_bytes": 4000, "null_bytes": 100, "gap_bytes": 2300, "tail_bytes": 100,
        "groups": [group("low", (100, 700), 3, 2, 1), group("high", (3000, 3900), 9, 0, 0)],
        "running": 1, "waiting": 0, "steps": 7, "preemptions": 0, "refusals": 0,
    }  # fmt: skip
    regions = [
        {"name": "low", "lo": 1, "hi": 7, "pages": 1, "runs": [1, 1, 0, 1, 0, 0, 2, 1, 0, 2, 0, 1]},
        {"name": "high", "lo": 30, "hi": 39, "pages": 4, "runs": [1, 2, 0, 1, 4, 0, 1, 3, 0]},
    ]
    served = {
        "request_id": "cmpl-0123456789abcdef-0", "index": 0, "state": "running", "prompt_tokens": 12,
        "cached_tokens": 8, "output_tokens": 3, "limit": 16, "waited_seconds": 0.25, "waited_for": {"memory": 0.25},
        "cut_by": "low",
    }  # fmt: skip
    totals = {"prompt_tokens": 12, "generation_tokens": 30, "prefix_cache_queries": 12, "prefix_cache_hits": 8}
    return {
        "time": time, "state": "ready", "restarts": 0, "model": {"id": "tiny"}, "totals": totals, "refused": {},
        "pool": pool, "regions": regions, "served": [served], "left_out": 0,
    } | changes  # fmt: skip


@contextmanager
def toy(*lives: list[dict[str, Any]], status: int = 200, key: str | None = None) -> Iterator[str]:
    """A server that sends the frames of one life after another, a connection each; then it hangs."""
    left = list(lives)
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(status if allowed else 401)
            self.end_headers()
            if not allowed or status != 200:
                return
            for item in left.pop(0):
                self.wfile.write(b"data: " + json.dumps(item).encode() + b"\n\n")
            if not left:
                over.wait()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


# -- the picture --------------------------------------------------------------------------------------------


def test_parts_leave_no_byte_out() -> None:
    parts = parts_of(frame())
    assert [lo for _, _, lo, _ in parts] == [0, *(hi for _, _, _, hi in parts[:-1])], "they adjoin"
    sizes: dict[tuple[str, int | None], int] = {}
    for state, index, lo, hi in parts:
        sizes[state, index] = sizes.get((state, index), 0) + hi - lo
    assert sizes == {
        ("null", None): 100, ("live", 0): 300, ("cached", 0): 200, ("hole", 0): 100, ("gap", None): 2300,
        ("live", 1): 900, ("tail", None): 100,
    }  # fmt: skip
    assert parts[2] == ("hole", 0, 200, 300), "the hole lies where it is"


def test_each_character_is_what_most_of_its_bytes_are() -> None:
    cells = strip(parts_of(frame()), 40)
    assert cells[:8] == [("null", None), ("live", 0), ("hole", 0), ("live", 0), ("live", 0), ("cached", 0),
                         ("cached", 0), ("gap", None)]  # fmt: skip
    assert cells[-10:] == [("live", 1)] * 9 + [("tail", None)]
    assert strip(parts_of(frame()), 2) == [("gap", None), ("gap", None)]


def test_once_prints_plain_figures_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    later = frame(2.0, totals=frame()["totals"] | {"generation_tokens": 50})
    with toy([frame(), later]) as url:
        assert main(["top", "--url", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text, "no control codes in a pipe"
    assert "tiny serving" in text
    assert "50 tokens (10.0 a second)" in text
    assert "prefix hits 67% of 12 tokens" in text
    numbers = re.findall(r"^(gap|null|tail|low|high|arena) +([\d, ]+)$", text, re.MULTILINE)
    cells = {name: [int(cell.replace(",", "")) for cell in values.split()] for name, values in numbers}
    assert cells.pop("arena") == [4000]
    assert sum(sum(row[: 3 if len(row) > 1 else 1]) for row in cells.values()) == 4000
    assert re.search(r"89abcdef|abcdef-0 +running +12 +8 +3 of 16 +0.2 s +memory +low", text)


def test_without_an_engine_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with toy([frame(state="restarting", restarts=1, pool=None)]) as url:
        assert main(["top", "--url", url, "--once"]) == 0
    assert capsys.readouterr().out.strip() == "tiny engine restarting, restarted 1 ×"


def test_requests_beyond_the_screen_are_counted() -> None:
    out = StringIO()
    Screen(out, live=False).show(None, frame(left_out=41))
    assert "and 41 more" in out.getvalue()


# -- what goes wrong ----------------------------------------------------------------------------------------


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    return refusal(run("top", *args), *capsys.readouterr())


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with toy() as url:
        pass  # gone
    assert f"{url}: no server answers there (Connection refused)" in error_of(capsys, "--url", url)


def test_what_is_no_isthmus(capsys: pytest.CaptureFixture[str]) -> None:
    with toy(status=404) as url:
        assert "has no /v1/pool/stream" in error_of(capsys, "--url", url)
    with toy(status=500) as url:
        assert "answers 500" in error_of(capsys, "--url", url, "--once")
    assert "--url nowhere" in error_of(capsys, "--url", "nowhere")
    assert "--interval 0" in error_of(capsys, "--interval", "0")


def test_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_API_KEY", raising=False)
    with toy([frame(), frame(1.0)], key="secret") as url:
        assert "asks for a key: --api-key or ISTHMUS_API_KEY" in error_of(capsys, "--url", url)
        assert "refuses this key" in error_of(capsys, "--url", url, "--api-key", "guess")
        monkeypatch.setenv("ISTHMUS_API_KEY", "secret")
        assert main(["top", "--url", url, "--once"]) == 0


def test_it_comes_back_with_the_server() -> None:
    with toy([frame(1.0)], [frame(2.0)]) as url:
        news = list(islice(watch(url, None, retry=0.0), 3))
    assert [item if isinstance(item, str) else item["time"] for item in news] == [
        1.0, f"{url}: the server ended the stream", 2.0,
    ]  # fmt: skip


def test_frames_are_shown_no_more_often_than_asked() -> None:
    times = [0.0, 0.5, 1.0, 1.5, 2.0, 0.1]  # the last one: the clock was set back
    shown = [(item["time"], before and before["time"]) for before, item in pairs(map(frame, times), 1.0)]  # type: ignore[index]
    assert shown == [(0.0, None), (1.0, 0.0), (2.0, 1.0), (0.1, 2.0)]


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_it_quietly() -> None:
    with toy([frame(), frame(1.0)]) as url:
        command = [sys.executable, "-m", "isthmus", "top", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("tiny serving"), "in a pipe it prints picture after picture"
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
            finally:
                process.kill()  # or the end of `with` would wait for it without a limit
    assert process.returncode == 130
    assert errors == "isthmus: interrupted\n"
