"""`isthmus chat --url` and `isthmus eval --url`: what a server answers is what the engine answers in this process."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from isthmus.chat.server import ServerSpeaker
from isthmus.chat.turns import Message, Piece, TooLongError
from isthmus.cli import main
from isthmus.endpoint import Endpoint
from isthmus.errors import ConfigError, IsthmusError, ModelError
from isthmus.params import SamplingParams
from tests.server.running import Server
from tests.test_eval import write_tasks

HELLO: Sequence[Message] = ({"role": "user", "content": "hello"},)
SMALL = ("--dtype", "float32", "--page-size", "4", "--pool-bytes", "4m")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


def talk(lines: str, monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "stdin", StringIO(lines))
    return main(["chat", *map(str, args), *GREEDY])


def test_a_chat_with_a_server_is_one_with_its_engine(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "tell me of the sea\nand then?\n"
    assert talk(lines, monkeypatch, "--url", f"{server.url}/v1") == 0
    remote = capsys.readouterr()
    assert talk(lines, monkeypatch, folder, *SMALL) == 0
    local = capsys.readouterr()
    assert remote.out == local.out
    assert len(remote.out) > 10
    second = remote.err.splitlines()[1]
    assert " tokens in, " in second
    assert " 0 of them cached" not in second
    assert " · 8 out · " in second


def test_a_chat_that_is_left_leaves_the_server_idle(server: Server) -> None:
    speaker = ServerSpeaker(Endpoint(server.url, None), None, SamplingParams(max_tokens=None, ignore_eos=True))
    answer = speaker.answer(HELLO)
    assert next(answer).output_tokens is None
    answer.close()
    server.wait_idle()


def test_a_conversation_that_is_too_long_for_a_server(server: Server) -> None:
    speaker = ServerSpeaker(Endpoint(server.url, None), "tiny", SamplingParams(max_tokens=None))
    with pytest.raises(TooLongError, match="the longest sequence is") as caught:
        list(speaker.answer([{"role": "user", "content": "ab" * 2000}]))
    assert "\n" not in str(caught.value)


def test_a_key_is_sent(tight: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="asks for a key"):
        Endpoint(tight.url, None).offer(None)
    with pytest.raises(ConfigError, match="refuses this key"):
        Endpoint(tight.url, "wrong").offer(None)
    assert Endpoint(tight.url, "secret").offer(None).name == "tight"
    monkeypatch.setenv("ISTHMUS_API_KEY", "secret")
    assert talk("hi\n", monkeypatch, "--url", tight.url) == 0


def test_the_scores_of_a_server_are_those_of_its_engine(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    tasks = write_tasks(tmp_path)
    found: list[dict[str, Any]] = []
    for where in (("--url", server.url, "--concurrency", "4"), SMALL):
        asked = ("--tasks", "tiny_choice,tiny_made,tiny_rolling", "--include-path", str(tasks), "--limit", "2")
        assert main(["eval", str(folder), *asked, *where, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for name in ("tiny_choice", "tiny_made", "tiny_rolling"):
        remote, local = (
            {key: value for key, value in result["results"][name].items() if isinstance(value, float)}
            for result in found
        )
        assert remote == pytest.approx(local, rel=1e-4)
        assert remote


# -- servers that do not behave -----------------------------------------------------------------------------------


@contextmanager
def toy(answer: bytes, status: int = 200, models: Any = None) -> Iterator[Endpoint]:
    """A server whose every answer to a chat is the same."""
    offered = {"data": [{"id": "toy"}]} if models is None else models

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps(offered).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(status, answer)

        def _send(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", None)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def refusal(message: str, code: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


WORD = event({"choices": [{"delta": {"content": "Hel"}}]})
FAULTS: dict[str, tuple[bytes, int, type[IsthmusError], str]] = {
    "it stops in the middle": (WORD, 200, IsthmusError, "ended the answer early"),
    "it sends what is no JSON": (WORD + b"data: {nope\n\n", 200, IsthmusError, "ended the answer early"),
    "it sends an error": (WORD + event({"error": {"message": "no memory"}}), 200, IsthmusError, "no memory"),
    "it refuses": (refusal("bad\nroles"), 400, ConfigError, "answers 400: bad roles"),
    "it has no template": (refusal("no template", "no_chat_template"), 400, ModelError, "isthmus generate"),
    "it is another program": (b"<html>", 404, ConfigError, "answers 404"),
}


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_server_that_fails_is_one_line(case: str) -> None:
    answer, status, kind, named = FAULTS[case]
    with toy(answer, status) as endpoint, pytest.raises(kind) as caught:
        list(ServerSpeaker(endpoint, None, SamplingParams()).answer(HELLO))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_tells_nothing_beside_the_text_does() -> None:
    with toy(WORD + event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + b"data: [DONE]\n\n") as endpoint:
        speaker = ServerSpeaker(endpoint, None, SamplingParams())
        assert speaker.greeting == f"toy on {endpoint.url}"
        assert list(speaker.answer(HELLO)) == [Piece("Hel"), Piece("", finish_reason="stop")]


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{"id": "other"}]}, {}, []])
def test_a_model_that_is_not_offered(models: Any) -> None:
    with toy(b"", models=models) as endpoint, pytest.raises(ConfigError, match="--url") as caught:
        endpoint.offer("toy")
    assert "\n" not in str(caught.value)
