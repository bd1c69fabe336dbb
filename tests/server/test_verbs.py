"""`isthmus chat --url` and `isthmus eval --url`: what a server answers is what the engine answers in this process."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from isthmus.chat.server import ServerSpeaker
from isthmus.chat.turns import Message, Piece, TooLongError
from isthmus.cli import main
from isthmus.endpoint import Endpoint
from isthmus.errors import ConfigError, IsthmusError, ModelError
from isthmus.evaluate import server as evaluate_server
from isthmus.params import SamplingParams
from tests.command import refusal
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


WAITS = -1


class Toy(ThreadingHTTPServer):
    """A server whose every answer to a request is the same, with statuses in turn, the last of them for good.

    Args:
        statuses: 0 is no answer at all, and WAITS none before the test ends.
        missing: bytes that it announces beside those that come.
        hangs: it keeps connections open instead of closing them.
        moved: where its models are.
    """

    def __init__(
        self,
        answer: bytes,
        statuses: Sequence[int] = (200,),
        models: Any = None,
        *,
        missing: int = 0,
        hangs: bool = False,
        moved: str | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), ToyHandler)
        self.answer, self.statuses, self.missing, self.hangs, self.moved = answer, [*statuses], missing, hangs, moved
        self.offered = {"data": [{"id": "toy"}]} if models is None else models
        self.keys: list[tuple[str, str | None]] = []  # the method of each request, and what it had for a key
        self.done = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class ToyHandler(BaseHTTPRequestHandler):
    server: Toy

    def do_GET(self) -> None:
        self._send(200 if self.server.moved is None else 302, json.dumps(self.server.offered).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        left = self.server.statuses
        self._send(left.pop(0) if len(left) > 1 else left[0], self.server.answer)

    def _send(self, code: int, body: bytes) -> None:
        self.server.keys.append((self.command, self.headers["Authorization"]))
        if code == WAITS:
            self.server.done.wait(60)
        if code in (0, WAITS):
            return
        self.send_response(code)
        if self.server.moved is not None:
            self.send_header("Location", self.server.moved)
        if self.server.missing:
            self.send_header("Content-Length", str(len(body) + self.server.missing))
        self.end_headers()
        self.wfile.write(body)
        if self.server.hangs:
            self.server.done.wait(60)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def running(server: Toy) -> Iterator[Endpoint]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", None)
    finally:
        server.done.set()
        server.shutdown()
        thread.join()
        server.server_close()


def toy(answer: bytes, status: int = 200, models: Any = None) -> AbstractContextManager[Endpoint]:
    return running(Toy(answer, [status], models))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def refused(message: str, code: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


WORD = event({"choices": [{"delta": {"content": "Hel"}}]})
FAULTS: dict[str, tuple[bytes, int, type[IsthmusError], str]] = {
    "it stops in the middle": (WORD, 200, IsthmusError, "ended the answer early"),
    "it sends what is no JSON": (WORD + b"data: {nope\n\n", 200, IsthmusError, "ended the answer early"),
    "it sends an error": (WORD + event({"error": {"message": "no memory"}}), 200, IsthmusError, "no memory"),
    "it refuses": (refused("bad\nroles"), 400, ConfigError, "answers 400: bad roles"),
    "it has no template": (refused("no template", "no_chat_template"), 400, ModelError, "isthmus generate"),
    "it is another program": (b"<html>", 404, ConfigError, "answers 404"),
    "its events are others": (b"data: [1]\n\n", 200, IsthmusError, "not those of OpenAI's API"),
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


@pytest.mark.parametrize("hangs", [False, True])
def test_an_answer_that_breaks_off_is_one_line(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.endpoint._GREETING", 0.1)
    with running(Toy(b"", missing=9, hangs=hangs)) as endpoint, pytest.raises(ConfigError, match="broke off") as caught:
        endpoint.offer(None)
    assert "\n" not in str(caught.value)


def test_a_refusal_that_breaks_off_is_one_line() -> None:
    with running(Toy(refused("never"), [500], missing=9)) as endpoint, pytest.raises(ConfigError, match="answers 500"):
        list(endpoint.events("/v1/chat/completions", {}, 60.0))


def test_another_server_that_this_one_names_gets_no_key() -> None:
    other = Toy(b"")
    with running(other) as there, running(Toy(b"", moved=f"{there.url}/v1/models")) as here:
        assert Endpoint(here.url, "my-secret").offer(None).name == "toy"
    assert other.keys == [("GET", None)]


@pytest.mark.parametrize("key", ["my-secret\n", "ключ"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key") as caught:
        Endpoint("http://127.0.0.1:1", key)
    assert key.strip() not in str(caught.value)


# -- evaluations on them ------------------------------------------------------------------------------------------

OFFERED = {"data": [{"id": "toy", "max_model_len": 66}]}
SAID = json.dumps({"choices": [{"index": 0, "text": " on"}]}).encode()
EVALS: dict[str, tuple[bytes, Sequence[int], str]] = {
    "it refuses": (refused("the longest\nsequence is 66 tokens"), [400], "answers 400: the longest sequence is 66"),
    "it is busy for good": (refused("try later"), [503], "answers 503: try later"),
    "it goes away": (b"", [0], "/v1/completions does not answer: "),
    "it is another program": (b"{}", [200], "not that of OpenAI's API"),
    "it answers without json": (b"<html>", [200], "not that of OpenAI's API"),
}


@pytest.fixture
def asking(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`isthmus eval` of six questions on an endpoint."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(evaluate_server, "_WAITS", (0.0, 0.0))
    monkeypatch.delenv("ISTHMUS_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
    tasks = write_tasks(tmp_path)

    def run(endpoint: Endpoint, *args: object) -> int:
        asked = ("eval", folder, "--tasks", "tiny_made", "--include-path", tasks, "--url", endpoint.url, *args)
        return main([*map(str, asked)])

    return run


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("case", EVALS, ids=str)
def test_a_server_that_fails_an_evaluation_is_one_line_without_the_key(
    case: str, concurrency: int, asking: Callable[..., int], capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    answer, statuses, named = EVALS[case]
    server = Toy(answer, statuses, OFFERED)
    with running(server) as endpoint:
        code = asking(endpoint, "--api-key", "my-secret", "--concurrency", concurrency)
    gc.collect()  # errors that nobody looked at are shown then
    captured = capfd.readouterr()
    line = refusal(code, captured.out, captured.err.splitlines(keepends=True)[-1])
    assert line.startswith(f"isthmus: error: {endpoint.url}")
    assert named in line
    assert "Traceback" not in captured.err
    assert "my-secret" not in captured.err + captured.out + caplog.text
    assert not caplog.records
    assert {key for _, key in server.keys} == {"Bearer my-secret"}
    if statuses == [400] and concurrency == 1:
        assert len(server.keys) == 2, "the models and one request: the same question would be refused again"


def test_only_a_key_that_was_given_is_sent(asking: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    server = Toy(SAID, models=OFFERED)
    with running(server) as endpoint:
        assert asking(endpoint, "--json") == 0
    assert server.keys == [("GET", None)] + [("POST", None)] * 6
    assert json.loads(capsys.readouterr().out)["results"]["tiny_made"]


def test_what_a_busy_server_did_not_take_is_sent_again(asking: Callable[..., int]) -> None:
    server = Toy(SAID, [503, 0, 200], OFFERED)
    with running(server) as endpoint:
        assert asking(endpoint, "--concurrency", 1) == 0
    assert len(server.keys) == 1 + 6 + 2


def test_what_a_server_is_slow_with_is_not_asked_for_again(
    asking: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_server._SILENCE.total is None, "an answer may take as long as it takes"
    monkeypatch.setattr(evaluate_server, "_SILENCE", aiohttp.ClientTimeout(total=None, sock_read=0.1))
    server = Toy(SAID, [WAITS], OFFERED)
    with running(server) as endpoint:
        code = asking(endpoint, "--concurrency", 1)
    out, err = capsys.readouterr()
    assert "has not answered for too long" in refusal(code, out, err.splitlines(keepends=True)[-1])
    assert len(server.keys) == 2
