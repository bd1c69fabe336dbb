"""What is refused, and how: status, `param`, one line; and what the command line refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.command import refusal
from tests.server.running import Server, start

HI = [{"role": "user", "content": "hi"}]


def check(answer: Any, status: int, param: str | None, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "\n" not in error["message"]
    for word in words:
        assert word in error["message"]
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "user": "me"}, "user"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [5] * 2048}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 1000}, "n"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "a", "logprobs": 100}, "logprobs"),
        ({"prompt": "a", "seed": 1 << 63}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop.0"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 1000}}, "logit_bias.1"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [999999]}, "stop_token_ids"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"extra": True}}, "stream_options.extra"),
    ],
)
def test_completions_that_are_refused(server: Server, body: dict[str, Any], param: str) -> None:
    error = check(server.http.post("/v1/completions", json=body), 400, param, param.split(".", maxsplit=1)[0])
    assert error["type"] == "invalid_request_error"


TOOL = {"type": "function", "function": {"name": "f"}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bogus"}}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood"),
        ({"messages": HI * 300}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"store": True}, "store"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": BAD_SCHEMA}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_chats_that_are_refused(server: Server, more: dict[str, Any], param: str) -> None:
    check(server.http.post("/v1/chat/completions", json={"messages": HI} | more), 400, param)


def test_bodies_that_are_no_requests(server: Server) -> None:
    for content in (b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "top_p": NaN}'):
        answer = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (content, answer.text)
        assert answer.json()["error"]["message"]
    for content, kind, word in (
        (b'{"prompt": }', "application/json", "not JSON: Expecting value at character 11"),
        (b'["a"]', "application/json", "not a JSON object"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),  # curl -d alone
        (b"prompt=a", "text/plain", "Content-Type: application/json"),
        (b"", "application/json", "the body is empty"),
    ):
        check(server.http.post("/v1/completions", content=content, headers={"content-type": kind}), 400, None, word)
    check(server.http.post("/v1/completions", json={"prompt": "a", "": 1}), 400, "", '"" is not known to this server')
    check(server.http.get("/v1/nothing"), 404, None, "/v1/nothing")
    check(server.http.get("/v1/completions"), 405, None)


def test_models(server: Server) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.completions.create(model="other", prompt="x")
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"


def test_request_ids_come_back(server: Server) -> None:
    assert server.http.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {server.http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b")}
    assert len(made) == 2


def test_the_key_is_needed(tight: Server) -> None:
    for header in ({"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": ""}):
        for path in ("/v1/models", "/v1/pool", "/openapi.json"):
            error = check(tight.http.get(path, headers=header), 401, None, "key")
            assert error["type"] == "authentication_error"
        check(tight.http.post("/reset_prefix_cache", headers=header), 401, None)
        assert tight.http.get("/health", headers=header).status_code == 200
        assert tight.http.get("/metrics", headers=header).status_code == 200
    assert [model.id for model in tight.openai.models.list()] == ["tight"]


def test_a_body_that_is_too_large(tight: Server) -> None:
    def chunks() -> Any:
        for _ in range(40):
            yield b" " * 2000

    check(tight.http.post("/v1/completions", content=b" " * 70_000), 413, None, "65,536")
    answer = tight.http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    check(answer, 413, None, "65,536")


def test_origins(tight: Server, server: Server) -> None:
    for origin, allowed in (("http://friend.example", "http://friend.example"), ("http://other.example", None)):
        answer = tight.http.get("/health", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed
    preflight = {"origin": "http://friend.example", "access-control-request-method": "POST"}
    assert tight.http.options("/v1/completions", headers=preflight | {"authorization": ""}).status_code == 200
    assert (
        "access-control-allow-origin" not in server.http.get("/health", headers={"origin": "http://a.example"}).headers
    )


def test_what_can_never_fit(tight: Server) -> None:
    check(tight.http.post("/v1/completions", json={"prompt": [5] * 1600, "max_tokens": 100}), 400, "prompt", "1,600")


def test_commands_that_are_refused(server: Server, folder: Path, tmp_path: Path) -> None:
    """One line and exit code 2, before or after the engine process starts."""
    cases = [
        (
            [str(folder), "--port", server.url.rpartition(":")[2]],
            "(Address already in use: stop what does, or choose another --port)",
        ),
        ([str(tmp_path)], "no config.json"),
        ([str(folder), "--port", "99999"], "--port must be"),
        ([str(folder), "--chat-template", "/nowhere"], "--chat-template /nowhere"),
        ([str(folder), "--host", "256.0.0.1"], "cannot listen there (Name or service not known)"),
        ([str(folder), "-tp", "2"], "--tensor-parallel-size must be 1"),
        ([str(folder), "--schedule-policy", "lpm"], "--schedule-policy lpm (see isthmus serve --help)"),
    ]
    running = [(start(args[0], subprocess.PIPE, *args[1:]), words) for args, words in cases]
    for process, words in running:
        out, errors = process.communicate(timeout=60)
        assert words in refusal(process.returncode, out, errors)


def test_without_the_extra(folder: Path) -> None:
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'fastapi': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from isthmus.cli import main\n"
        f"sys.exit(main(['serve', {str(folder)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = refusal(done.returncode, done.stdout, done.stderr)
    assert line.endswith("serve needs the package fastapi: pip install 'isthmus[serve]'\n")
