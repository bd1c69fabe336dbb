"""Lives and deaths: of the engine process under the front, and of the front itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq

from isthmus.params import SamplingParams
from isthmus.server import wire
from tests.server.conftest import PLAIN
from tests.server.running import Server, serve, until
from tests.server.test_aborts import RawClient

LONG = {"prompt": "the cat", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def mortal(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(folder, tmp_path_factory.mktemp("logs"), *PLAIN, "--drain-timeout", "60") as server:
        yield server


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Run it beside us; what it returned or raised comes in the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_the_engine_is_killed_and_comes_back(mortal: Server) -> None:
    stream = RawClient(mortal, LONG | {"stream": True})
    assert b"data: " in stream.read_some() + stream.read_some()
    whole, answer = in_thread(lambda: mortal.http.post("/v1/completions", json=LONG))
    until(mortal.pool, lambda pool: pool["running"] == 2)
    first = mortal.engine_pid()

    os.kill(first, signal.SIGKILL)

    text = stream.read_all().decode()  # it ends: no half-open stream
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert error["code"] == "engine_died"
    assert "SIGKILL" in error["message"]
    whole.join(60)
    assert answer[0].status_code == 503
    assert answer[0].json()["error"]["code"] == "engine_died"

    health = mortal.http.get("/health")
    assert health.status_code == 503, "a new engine takes seconds"
    assert int(health.headers["retry-after"]) >= 1
    assert mortal.http.get("/metrics").status_code == 200
    assert mortal.http.get("/v1/pool").status_code == 503
    with pytest.raises(openai.InternalServerError) as caught:
        mortal.openai.completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == 503

    until(lambda: mortal.http.get("/health").status_code, lambda status: status == 200)
    assert mortal.engine_pid() != first
    again = mortal.openai.completions.create(model="tiny", prompt="the cat", max_tokens=3)
    assert again.usage is not None
    assert again.usage.completion_tokens >= 1
    mortal.wait_idle()


def test_sigterm_lets_running_requests_end(mortal: Server) -> None:
    """Last: afterwards this server is gone."""
    stream = RawClient(mortal, LONG | {"stream": True, "max_tokens": 300})
    head = stream.read_some()
    whole, answer = in_thread(lambda: mortal.http.post("/v1/completions", json=LONG | {"max_tokens": 300}))
    until(mortal.pool, lambda pool: pool["running"] == 2)
    engine = mortal.engine_pid()

    mortal.process.send_signal(signal.SIGTERM)

    assert (head + stream.read_all()).count(b"data: [DONE]") == 1
    whole.join(60)
    assert answer[0].json()["usage"]["completion_tokens"] == 300
    assert mortal.process.wait(60) == 0
    assert not Path(f"/proc/{engine}").exists(), "the engine outlives the front"


def test_the_time_to_drain_is_limited(folder: Path, tmp_path: Path) -> None:
    with serve(folder, tmp_path, *PLAIN, "--drain-timeout", "0.2") as server:
        stream = RawClient(server, LONG | {"stream": True, "n": 8})
        head = stream.read_some()
        server.process.send_signal(signal.SIGTERM)
        text = (head + stream.read_all()).decode()
        assert "[DONE]" not in text
        last = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")][-1]
        assert "shutting down" in json.loads(last)["error"]["message"]
        assert server.process.wait(60) == 0


def test_the_engine_process_ends_with_its_front(tmp_path: Path) -> None:
    """The operating system closes the input of a front that was killed; the model is not even found then."""
    start = wire.Start(f"ipc://{tmp_path}/engine", str(tmp_path), {"model": "/nowhere/at/all"})
    command = [sys.executable, "-m", "isthmus.server.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(msgspec.json.encode(start) + b"\n", timeout=60)
    assert process.returncode == 0
    assert errors == b""


BROKEN = """
import sys
from isthmus.engine import core
def step(engine):
    if engine.has_work:
        raise RuntimeError("boom")
    return []
core.Engine.step = step
from isthmus.server.worker import main
sys.exit(main())
"""


def test_an_error_in_a_step_is_told_before_the_end(folder: Path, tmp_path: Path) -> None:
    settings = {"model": str(folder), "dtype": "float32", "pool_bytes": 1 << 20}
    start = wire.Start(f"ipc://{tmp_path}/engine", str(tmp_path), settings)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(start.endpoint)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        command = [sys.executable, "-c", BROKEN]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
            assert isinstance(wire.decode_to_front(socket.recv()), wire.ModelInfo)
            socket.send(wire.encode(wire.Submit("a", [1, 2], SamplingParams())))
            while isinstance(message := wire.decode_to_front(socket.recv()), wire.Report):
                pass
            assert message == wire.Failed("RuntimeError: boom", by_user=False)
            assert process.wait(60) == 1


def test_the_front_needs_no_torch() -> None:
    code = "import sys, isthmus.server.serve; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
