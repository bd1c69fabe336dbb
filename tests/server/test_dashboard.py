"""What the dashboard is told: how many watch and how slowly is the front's to bound, and it is never anybody's text."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.datastructures import Headers

from isthmus.memory import Group, Pool, opaque_spec
from isthmus.server import wire
from isthmus.server.connection import Protocol
from isthmus.server.dashboard import Broadcast, Stream
from isthmus.server.dashboard_page import wants_page
from isthmus.server.dashboard_view import MOST_CELLS, cells
from isthmus.server.engine_client import EngineClient
from isthmus.server.errors import ApiError
from isthmus.server.metrics import Metrics
from tests.server.running import Server, until

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
LONG = {"prompt": "a secret the cat told", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def frames(server: Server, until: Callable[[dict[str, Any]], object]) -> tuple[dict[str, Any], str]:
    """The first frame that is so, and everything that was read."""
    raw = ""
    with server.http.stream("GET", "/v1/pool/stream") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            raw += line
            assert len(raw) < 1 << 20, "it does not come to that"
            if line.startswith("data: ") and until(frame := json.loads(line.removeprefix("data: "))):
                return frame, raw
    raise AssertionError("the stream ended")


# -- the page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        (BROWSER, True), ("text/html", True), ("", False), ("*/*", False), ("application/json", False),
        ("application/json, text/html;q=0.5", False), ("text/html;q=0", False), ("text/html;q=x", False),
    ],
)  # fmt: skip
def test_only_who_asks_for_html_gets_it(accept: str, page: bool) -> None:
    assert wants_page(Headers({"accept": accept})) is page


def test_the_root_is_a_page_for_browsers_and_json_for_the_rest(server: Server) -> None:
    assert server.http.get("/").json()["server"] == "isthmus"
    page = server.http.get("/", headers={"accept": BROWSER})
    assert page.text.startswith("<!doctype html>")
    assert page.headers["vary"] == "accept"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    script = server.http.get("/static/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = server.http.get("/static/app.js", headers={"if-none-match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "MIT License" in server.http.get("/static/uplot/LICENSE.txt").text


@pytest.mark.parametrize("name", ["../app.py", "%2e%2e/app.py", "/etc/passwd", "nothing.js", ""])
def test_nothing_but_the_dashboard_s_files_is_served(server: Server, name: str) -> None:
    assert server.http.get(f"/static/{name}").status_code == 404


def test_the_page_needs_no_key_and_the_stream_does(tight: Server) -> None:
    with httpx.Client(base_url=tight.url) as stranger:
        assert stranger.get("/", headers={"accept": BROWSER}).status_code == 200
        assert stranger.get("/static/style.css").status_code == 200
        assert stranger.get("/v1/pool/stream").status_code == 401
        assert stranger.get("/static/../v1/pool").status_code == 401
    frame, _ = frames(tight, lambda frame: frame["pool"])
    assert frame["model"] == {"id": "tight", "chat": True, "max_model_len": frame["model"]["max_model_len"]}


# -- what frames say ----------------------------------------------------------------------------------------


def assert_agrees(frame: dict[str, Any]) -> None:
    """Cells and figures of a frame are of one moment."""
    for group, region in zip(frame["pool"]["groups"], frame["regions"], strict=True):
        runs = np.array(region["runs"], np.int64).reshape(-1, 3)
        live, cached = (runs[:, 0] * runs[:, 1]).sum(), (runs[:, 0] * runs[:, 2]).sum()
        span = region["hi"] - region["lo"]
        assert group["pages"] == {"live": live, "cached": cached, "hole": span - live - cached}
        assert group["frontiers"] == [region["lo"] * group["page_bytes"], region["hi"] * group["page_bytes"]]


def test_frames_tell_who_is_served_by_numbers_alone(server: Server) -> None:
    prompt = server.http.post("/tokenize", json={"prompt": LONG["prompt"]}).json()
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        text = next(lines)
        frame, raw = frames(server, lambda frame: frame["served"] and frame["served"][0]["output_tokens"] > 5)
        assert_agrees(frame)
        (served,) = frame["served"]
        assert served["state"] == "running"
        assert served["prompt_tokens"] == prompt["count"]
        assert served["limit"] == 1500
        assert frame["pool"]["running"] == 1
    assert text
    assert "secret" not in raw
    server.wait_idle()
    frame, raw = frames(server, lambda frame: frame["pool"]["running"] == 0)
    assert_agrees(frame)
    assert frame["served"] == []
    assert any(group["pages"]["cached"] for group in frame["pool"]["groups"]), "what it left is cached"


def test_frames_tell_receipts_of_those_that_ended(server: Server) -> None:
    answer = server.http.post(
        "/v1/completions", json={"prompt": ["x", "the cat sat"], "max_tokens": 3, "isthmus": {"receipt": True}}
    ).json()
    frame, _ = frames(server, lambda frame: frame["pool"])
    ended = {receipt.pop("request_id"): receipt for receipt in frame["ended"]}
    for prompt in (0, 1):
        receipt = ended[f"{answer['id']}-{prompt}"]
        assert 1 <= receipt.pop("output_tokens") <= 3
        assert receipt == answer["isthmus"]["receipt"][prompt]


# -- regions as cells ---------------------------------------------------------------------------------------


def test_a_region_of_any_size_is_told_in_few_cells() -> None:
    """Every third page of 300,000 is a hole: far more runs than a screen has columns."""
    pool = Pool(16 * 400_000, [Group("full", opaque_spec(16, 1), "append", None)])
    plan = pool.plan({"full": 300_000})
    assert plan
    pool.commit(plan)
    ids = np.asarray(plan.ids["tokens"])  # type: ignore[union-attr]
    pool.release("tokens", ids[1::3])
    told = cells(pool.regions["full"], None)
    runs = np.array(told.runs).reshape(-1, 3)
    assert (told.pages & (told.pages - 1)) == 0
    assert MOST_CELLS // 2 <= runs[:, 0].sum() <= MOST_CELLS
    assert (runs[:, 0] * runs[:, 1]).sum() == pool.regions["full"].live == 200_000
    assert not runs[:, 2].any()


def test_small_regions_are_told_page_by_page() -> None:
    pool = Pool(16 * 20, [Group("full", opaque_spec(16, 1), "append", None)])
    assert cells(pool.regions["full"], None).runs == [], "an empty region has no cells"
    plan = pool.plan({"full": 6})
    pool.commit(plan)
    pool.release("tokens", np.asarray(plan.ids["tokens"])[[1, 2]])  # type: ignore[union-attr]
    told = cells(pool.regions["full"], None)
    assert (told.pages, told.runs) == (1, [1, 1, 0, 2, 0, 0, 3, 1, 0])


# -- who watches --------------------------------------------------------------------------------------------


class Engine:
    """Counts what is asked of it."""

    def __init__(self, **options: Any) -> None:
        self.looks = 0
        self.is_over = False
        self.broadcast = Broadcast(
            self._look, lambda: {"look": self.looks}, lambda: self.is_over, interval=0.0, **options
        )

    async def _look(self, patience: float) -> None:
        self.looks += 1


class Client:
    """The far end of a stream: takes what is sent while `reads`, and leaves when told."""

    def __init__(self, broadcast: Broadcast) -> None:
        self.bodies: list[bytes] = []
        self.is_complete = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.leaves = asyncio.Event()
        self.news = asyncio.Event()
        scope = {"type": "http", "extensions": {"isthmus.cut": self.leaves.set}}
        self.task = asyncio.create_task(Stream(broadcast)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        await asyncio.sleep(0)
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])
            self.is_complete = not message["more_body"]
            self.news.set()

    async def another(self) -> bytes:
        self.news.clear()
        await self.news.wait()
        return self.bodies[-1]


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(timed())


async def settled(task: Awaitable[None], broadcast: Broadcast) -> None:
    await task
    assert len(broadcast) == 0
    assert not broadcast.is_polling


def test_nothing_is_asked_unless_somebody_watches() -> None:
    async def scene() -> None:
        engine = Engine()
        await asyncio.sleep(0)
        assert engine.looks == 0
        first, second = Client(engine.broadcast), Client(engine.broadcast)
        await first.another()
        await second.another()
        assert any(mine is theirs for mine in first.bodies for theirs in second.bodies), "frames are made once for all"
        first.leaves.set()
        await first.task
        assert engine.broadcast.is_polling, "one still watches"
        second.leaves.set()
        await settled(second.task, engine.broadcast)
        looks = engine.looks
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.looks == looks
        third = Client(engine.broadcast)
        assert json.loads((await third.another()).removeprefix(b"data: "))["look"] > looks, "no frame of long ago"
        third.leaves.set()
        await settled(third.task, engine.broadcast)

    play(scene)


def test_whoever_reads_slowly_misses_frames() -> None:
    async def scene() -> None:
        engine = Engine()
        slow, fast = Client(engine.broadcast), Client(engine.broadcast)
        await slow.another()
        slow.reads.clear()
        had = len(slow.bodies)
        for _ in range(50):
            await fast.another()
        slow.reads.set()
        await slow.another()
        await slow.another()
        assert len(slow.bodies) <= had + 3
        looks = [json.loads(body.removeprefix(b"data: "))["look"] for body in slow.bodies]
        assert looks[-1] >= looks[0] + 45, "it goes on with the newest"
        for client in (slow, fast):
            client.leaves.set()
            await client.task

    play(scene)


def test_whoever_does_not_read_is_dropped() -> None:
    async def scene() -> None:
        engine = Engine(patience=0.01)
        client = Client(engine.broadcast)
        await client.another()
        client.reads.clear()
        await settled(client.task, engine.broadcast)
        assert not client.is_complete

    play(scene)


def test_a_connection_is_cut_without_a_word_of_error(caplog: pytest.LogCaptureFixture) -> None:
    """Its reader has stopped reading and stays connected: the answer can have no end."""

    async def scene() -> None:
        filler = "x" * 100_000
        broadcast = Broadcast(Engine()._look, lambda: {"filler": filler}, lambda: False, interval=0.0, patience=0.05)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(Stream(broadcast), http=Protocol, lifespan="off", log_config=None)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await asyncio.to_thread(until, lambda: len(broadcast), lambda watchers: watchers == 0)
            assert not (await reader.read()).endswith(b"\r\n0\r\n\r\n"), "what was on its way, and no end"
            writer.close()
            server.should_exit = True
            await serving

    with caplog.at_level(logging.INFO):
        play(scene)
    assert "was dropped" in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_there_are_only_so_many_watchers() -> None:
    async def scene() -> None:
        engine = Engine(most=1)
        first, second = Client(engine.broadcast), Client(engine.broadcast)
        with pytest.raises(ApiError) as refused:
            await second.task
        assert refused.value.status == 429
        assert second.bodies == []
        first.leaves.set()
        await settled(first.task, engine.broadcast)

    play(scene)


def test_streams_end_with_the_server() -> None:
    async def scene() -> None:
        engine = Engine()
        client = Client(engine.broadcast)
        await client.another()
        engine.is_over = True
        await client.task
        assert client.is_complete, "or a server that drains would wait for it"
        late = Client(engine.broadcast)
        await late.task
        assert late.is_complete

    play(scene)


def test_a_fault_in_a_frame_ends_the_streams_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        broadcast = Broadcast(Engine()._look, lambda: {"nothing": 1 // 0}, lambda: False, interval=0.0)
        client = Client(broadcast)
        await client.task
        assert client.is_complete

    play(scene)
    assert "the dashboard's poller failed" in caplog.text


def test_an_engine_that_does_nothing_is_not_asked() -> None:
    """One `Look` for each report, however often somebody wants to see."""

    class Process:
        def __init__(self) -> None:
            self.sent: list[wire.ToEngine] = []

        def send(self, order: wire.ToEngine) -> None:
            self.sent.append(order)

    def report(steps: int, view: wire.View | None = None) -> wire.Report:
        stats = wire.Stats(0, 0, 64, 64, 0, 0, [], 0, 8, steps, 0, 0, 0)
        return wire.Report([], [], [], stats, view)

    async def scene() -> None:
        client = EngineClient({}, Metrics(lambda: None), max_queue=1, request_timeout=1.0)
        await client.look(0.0)
        process = Process()
        client.state, client._process = "ready", process  # type: ignore[assignment]
        client._hear(report(1))
        for _ in range(3):
            await client.look(0.0)
        assert process.sent == [wire.Look()], "it has not answered yet"
        client._hear(report(2, wire.View([], [], 0)))
        assert client.viewed is not None
        assert client.viewed[0].steps == 2
        for _ in range(3):
            await client.look(0.0)
        assert len(process.sent) == 1, "nothing has happened since"
        client._hear(report(3))
        await client.look(0.0)
        assert len(process.sent) == 2

    play(scene)
