"""Clients that vanish or dawdle: every byte comes back, and nobody else notices."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import TIGHT
from tests.server.running import Server, live, serve, until

LONG = {"max_tokens": 1200, "temperature": 0, "ignore_eos": True}


class RawClient:
    """A request over a bare socket, which reads only when it is told to."""

    def __init__(self, server: Server, body: dict[str, Any], path: str = "/v1/completions") -> None:
        address = urlsplit(server.url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(60)
        self.socket.connect((address.hostname, address.port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer secret\r\n"
        self.socket.sendall(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    def read_some(self) -> bytes:
        return self.socket.recv(2000)

    def read_all(self) -> bytes:
        parts = []
        while part := self.socket.recv(65536):
            parts.append(part)
        return b"".join(parts)

    def vanish(self) -> None:
        self.socket.close()


def begin(server: Server, prompt: int, *, stream: bool = True, **changes: Any) -> RawClient:
    return RawClient(server, {"prompt": [5] * prompt, "stream": stream} | LONG | changes)


ABORTED = 'isthmus:request_success_total{finished_reason="abort"}'


class Stepped:
    """A server whose engine takes a step when it is let. Between our calls it stands in the middle of one."""

    def __init__(self, server: Server, steps: TextIO) -> None:
        self.server = server
        self.pool = server.pool
        self._steps = steps

    def step(self, count: int = 1, *, orders: int = 0) -> dict[str, Any]:
        """Let so many steps end, for the last of which that many orders already wait; the pool as it was then."""
        end = self.pool()["steps"] + count
        self._steps.write("0\n" * (count - 1) + f"{orders}\n")
        self._steps.flush()
        return until(self.pool, lambda pool: pool["steps"] >= end)

    def run_until(self, ok: Callable[[dict[str, Any]], bool], count: int = 1) -> dict[str, Any]:
        """So many steps at a time until the pool is so."""
        while not ok(pool := self.step(count)):
            pass
        return pool

    def vanish(self, *clients: RawClient, requests: int = 1) -> dict[str, Any]:
        """They leave in the middle of a step, which is then let end; the pool as it was after that step.

        `requests` is what each of them has in the engine: one for each prompt.
        """
        aborted = self.server.metrics().get(ABORTED, 0)
        for client in clients:
            client.vanish()
        until(lambda: self.server.metrics().get(ABORTED, 0), lambda count: count == aborted + len(clients))
        return self.step(orders=len(clients) * requests)

    def all_vanish(self, *clients: RawClient, requests: int = 1) -> None:
        """They leave in the middle of a step, and nobody else is served: it is the last, and then no page is owned."""
        before = self.pool()
        assert live(before) > 0
        self.vanish(*clients, requests=requests)
        after = self.server.wait_idle()
        assert after["steps"] == before["steps"] + 1
        assert after["ids"]["live"] == sum(
            group["pages"]["cached"] for group in after["groups"] if group["name"] == "full"
        )
        assert self.server.metrics()["isthmus:engine_steps_total"] == after["steps"]


@contextmanager
def stepping(model: Path, folder: Path, *flags: str) -> Iterator[Stepped]:
    """A tight server whose engine waits for us."""
    pipe = folder / "steps"
    os.mkfifo(pipe)
    module = ("tests.server.other_worker", "tests.server.stepped_worker")
    flags = (*TIGHT, *flags)
    with (
        os.fdopen(os.open(pipe, os.O_RDWR), "w") as steps,  # nobody waits for the other end
        serve(model, folder, *flags, module=module, STEPS=str(pipe), ISTHMUS_API_KEY="secret") as server,
    ):
        server.http.headers["authorization"] = "Bearer secret"
        yield Stepped(server, steps)


@pytest.fixture(scope="module")
def shared_stepped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepped]:
    with stepping(folder, tmp_path_factory.mktemp("stepped"), "--request-timeout", "600") as stepped:
        yield stepped


@pytest.fixture
def stepped(shared_stepped: Stepped) -> Iterator[Stepped]:
    yield shared_stepped
    shared_stepped.server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_decoding(stepped: Stepped, stream: bool) -> None:
    client = begin(stepped.server, 8, stream=stream)
    assert stepped.step(20)["running"] == 1
    if stream:
        assert b"data: " in client.read_some() + client.read_some()
    stepped.all_vanish(client)


def test_a_client_that_leaves_during_prefill(stepped: Stepped) -> None:
    client = begin(stepped.server, 1200, max_tokens=100)
    tokens = stepped.server.metrics()["isthmus:generation_tokens_total"]
    stepped.step(20)
    assert stepped.server.metrics()["isthmus:generation_tokens_total"] == tokens, "no more than 160 of its tokens"
    stepped.all_vanish(client)


def test_a_client_that_leaves_without_having_read(stepped: Stepped) -> None:
    """Hundreds of kilobytes wait for a reader that never comes."""
    client = begin(stepped.server, 8, logprobs=20)
    stepped.step(400)
    stepped.all_vanish(client)


def test_a_client_that_reads_slowly_and_leaves(stepped: Stepped) -> None:
    client = begin(stepped.server, 8, logprobs=20)
    for _ in range(5):
        stepped.step(20)
        assert client.read_some()  # two kilobytes of some fifty
    stepped.all_vanish(client)


def test_clients_that_leave_while_waiting(stepped: Stepped) -> None:
    running = [begin(stepped.server, 8), begin(stepped.server, 8)]
    stepped.run_until(lambda pool: pool["running"] == 2)
    waiting = [begin(stepped.server, 8), begin(stepped.server, 8, stream=False)]
    stepped.run_until(lambda pool: pool["waiting"] == 2)
    stepped.vanish(*waiting)
    pool = stepped.step()
    assert (pool["running"], pool["waiting"]) == (2, 0)
    waiting = [begin(stepped.server, 8), begin(stepped.server, 8)]
    stepped.run_until(lambda pool: pool["waiting"] == 2)
    stepped.all_vanish(*waiting, *running)


def test_one_leaves_and_the_other_stays(stepped: Stepped) -> None:
    """The next step is already without it."""
    clients = [begin(stepped.server, 80, cache_salt=salt) for salt in ("e", "f")]
    stepped.run_until(lambda pool: pool["running"] == 2)
    both = stepped.step(30)
    stepped.vanish(clients[0])
    one = stepped.step()
    assert one["steps"] == both["steps"] + 2
    assert one["running"] == 1
    for mine, ours in zip(one["groups"], both["groups"], strict=True):
        assert 2 * mine["pages"]["live"] <= ours["pages"]["live"] + 2, "one of two that are alike, a step longer"
    stepped.all_vanish(clients[1])


def test_a_client_that_leaves_while_preempted(stepped: Stepped) -> None:
    before = stepped.pool()["preemptions"]
    # Two tenants: with one salt the same tokens would be one set of pages, and fit.
    clients = [begin(stepped.server, 600, max_tokens=800, cache_salt=salt) for salt in ("a", "b")]
    stepped.run_until(lambda pool: pool["preemptions"] > before and pool["waiting"] > 0, 10)
    stepped.vanish(clients[1])
    pool = stepped.step()
    assert (pool["running"], pool["waiting"]) == (1, 0), "the older one goes on"
    stepped.all_vanish(clients[0])


def test_clients_that_leave_while_one_is_preempted(stepped: Stepped) -> None:
    before = stepped.pool()["preemptions"]
    clients = [begin(stepped.server, 600, max_tokens=800, cache_salt=salt) for salt in ("c", "d")]
    stepped.run_until(lambda pool: pool["preemptions"] > before and pool["waiting"] > 0, 10)
    stepped.all_vanish(*clients)


def test_continuations_and_prompts_all_go(stepped: Stepped) -> None:
    client = RawClient(stepped.server, {"prompt": ["a", "b"], "n": 2, "stream": True} | LONG)
    stepped.run_until(lambda pool: pool["running"] == 2 and pool["waiting"] == 2)
    stepped.all_vanish(client, requests=2)


def test_requests_that_take_too_long(folder: Path, tmp_path: Path) -> None:
    """A status before the first text, an event after it; the engine is rid of them like of those whose client left."""
    with stepping(folder, tmp_path, "--request-timeout", "2") as stepped:
        late = stepped.server.http.post("/v1/completions", json={"prompt": "x"} | LONG)
        assert late.status_code == 408
        assert late.json()["error"]["code"] == "timeout"
        assert "--request-timeout (2 s)" in late.json()["error"]["message"]
        stepped.step(orders=1)
        client = begin(stepped.server, 8)
        stepped.step(3)
        events = [line for line in client.read_all().splitlines() if line.startswith(b"data: ")]
        assert len(events) > 1
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["type"] == "timeout_error"
        stepped.step(orders=1)
        stepped.server.wait_idle()


def test_aborted_requests_are_counted(tight: Server) -> None:
    before = tight.metrics().get(ABORTED, 0)
    client = begin(tight, 8)
    client.read_some()
    client.vanish()
    tight.wait_idle()
    assert tight.metrics()[ABORTED] == before + 1


def test_a_slow_reader_gets_everything_and_holds_up_nobody(server: Server) -> None:
    body = {"prompt": "the cat", "n": 4, "logprobs": 20, "stream": True} | LONG | {"max_tokens": 600}
    slow = RawClient(server, body)
    text = slow.read_some()
    for _ in range(3):  # others come and go meanwhile
        server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).raise_for_status()
    server.wait_idle()  # the engine is done with it, read or not
    text += slow.read_all()
    slow.vanish()
    assert text.count(b"data: [DONE]") == 1
    fast = server.http.post("/v1/completions", json=body | {"stream": False}).json()
    assert count_tokens(text) == sum(len(choice["logprobs"]["tokens"]) for choice in fast["choices"]) == 4 * 600


def count_tokens(response: bytes) -> int:
    """Tokens in the events of a chunked answer, whose chunks may begin anywhere."""
    body, rest = b"", response.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    events = [
        json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n") if event.startswith(b"data: {")
    ]
    return sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events)


def test_a_full_queue_is_a_429(tight: Server) -> None:
    clients = [begin(tight, 8) for _ in range(2)]
    for client in clients:
        client.read_some()  # these two have tokens and wait no more
    waiting = [begin(tight, 8) for _ in range(4)]
    until(tight.pool, lambda pool: pool["waiting"] == 4)
    answer = tight.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == "queue_full"
    assert "--max-queue" in error["message"]
    for client in [*waiting, *clients]:
        client.vanish()
    tight.wait_idle()
    tight.http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    assert tight.metrics()['isthmus:refusals_total{reason="queue_full"}'] >= 1


def test_metrics_agree_with_the_answers(server: Server) -> None:
    server.wait_idle()
    before = server.metrics()
    answer = server.http.post("/v1/completions", json={"prompt": ["the cat", "dog"], "n": 2, "max_tokens": 5}).json()
    after = server.metrics()

    def gained(name: str) -> float:
        return after[f"isthmus:{name}"] - before.get(f"isthmus:{name}", 0)

    assert gained("prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert gained("generation_tokens_total") == answer["usage"]["completion_tokens"]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert gained(f"{name}_count") == 1
    assert gained("request_queue_time_seconds_count") == 2
    pool = {name: value for name, value in after.items() if name.startswith("isthmus:pool_bytes")}
    assert sum(pool.values()) == server.pool()["arena_bytes"]
    assert sum(value for name, value in pool.items() if 'state="live"' in name) == 0
    assert after["isthmus:graph_bytes"] == server.pool()["graph_bytes"] == 0, "there are no graphs on a CPU"
    needed = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
              "moved_bytes_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
              "inter_token_latency_seconds_count")  # fmt: skip
    assert {f"isthmus:{name}" for name in needed} <= set(after)


def test_resetting_the_prefix_cache(server: Server) -> None:
    for path in ("/reset_prefix_cache", "/flush_cache"):
        answer = server.http.post(path)
        assert answer.status_code == 200
        pool = server.pool()
        assert sum(group["bytes"]["cached"] for group in pool["groups"]) == 0


def test_many_at_once(server: Server) -> None:
    """More streams than run at once, mixed lengths: each gets exactly its tokens."""
    bodies = [
        {"prompt": "the cat " * (1 + i % 5), "max_tokens": 5 + i, "seed": i, "ignore_eos": True} for i in range(24)
    ]
    alone = [server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
    clients = [RawClient(server, body) for body in bodies]
    answers = [json.loads(client.read_all().partition(b"\r\n\r\n")[2]) for client in clients]
    assert [answer["choices"][0]["text"] for answer in answers] == alone
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [body["max_tokens"] for body in bodies]
