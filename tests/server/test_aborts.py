"""Clients that vanish or dawdle: every byte comes back, and nobody else notices."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.running import Server, live, until

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
STEPS = 3
"""Steps an engine may take after the front knew of its last one and sent an abort: one whose report was on its way, the
one that was running, and one that began while the abort was. What happens once it has arrived is in test_worker.py."""


@contextmanager
def halted(server: Server) -> Iterator[None]:
    """The engine process stands still."""
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        until(
            lambda: Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0], lambda state: state == "T"
        )
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


def vanish(server: Server, *clients: RawClient) -> None:
    """They leave, and nobody else is served: the engine stops after a few steps, and owns no page."""
    with halted(server):
        steps, aborted = server.pool()["steps"], server.metrics().get(ABORTED, 0)
        for client in clients:
            client.vanish()
        until(lambda: server.metrics().get(ABORTED, 0), lambda count: count == aborted + len(clients))
    assert server.wait_idle()["steps"] - steps <= STEPS
    assert server.metrics()["isthmus:engine_steps_total"] - steps <= STEPS


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_decoding(tight: Server, stream: bool) -> None:
    client = begin(tight, 8, stream=stream)
    until(tight.pool, lambda pool: live(pool) > 0 and pool["running"] == 1)
    if stream:
        assert b"data: " in client.read_some() + client.read_some()
    vanish(tight, client)


def test_a_client_that_leaves_during_prefill(tight: Server) -> None:
    client = begin(tight, 1200, max_tokens=100)
    until(tight.pool, lambda pool: live(pool) > 0)
    vanish(tight, client)


def test_a_client_that_leaves_without_having_read(tight: Server) -> None:
    """Hundreds of kilobytes wait for a reader that never comes."""
    client = begin(tight, 8, logprobs=20)
    until(tight.pool, lambda pool: pool["steps"] > 0 and live(pool) > 0)
    before = tight.metrics()["isthmus:generation_tokens_total"]
    until(lambda: tight.metrics()["isthmus:generation_tokens_total"], lambda count: count > before + 400)
    vanish(tight, client)


def test_clients_that_leave_while_waiting(tight: Server) -> None:
    running = [begin(tight, 8), begin(tight, 8)]
    until(tight.pool, lambda pool: pool["running"] == 2)
    waiting = [begin(tight, 8), begin(tight, 8, stream=False)]
    until(tight.pool, lambda pool: pool["waiting"] == 2)
    for client in waiting:
        client.vanish()
    until(tight.pool, lambda pool: pool["waiting"] == 0 and pool["running"] == 2)
    waiting = [begin(tight, 8), begin(tight, 8)]
    until(tight.pool, lambda pool: pool["waiting"] == 2)
    vanish(tight, *waiting, *running)


def test_a_client_that_leaves_while_preempted(tight: Server) -> None:
    before = tight.pool()["preemptions"]
    # Two tenants: with one salt the same tokens would be one set of pages, and fit.
    clients = [begin(tight, 600, max_tokens=800, cache_salt=salt) for salt in ("a", "b")]
    until(tight.pool, lambda pool: pool["preemptions"] > before and pool["waiting"] > 0)
    clients[1].vanish()
    until(tight.pool, lambda pool: pool["waiting"] == 0)
    assert live(tight.pool()) > 0, "the older one goes on"
    vanish(tight, clients[0])


def test_clients_that_leave_while_one_is_preempted(tight: Server) -> None:
    before = tight.pool()["preemptions"]
    clients = [begin(tight, 600, max_tokens=800, cache_salt=salt) for salt in ("c", "d")]
    until(tight.pool, lambda pool: pool["preemptions"] > before and pool["waiting"] > 0)
    vanish(tight, *clients)


def test_continuations_and_prompts_all_go(tight: Server) -> None:
    client = RawClient(tight, {"prompt": ["a", "b"], "n": 2, "stream": True} | LONG)
    until(tight.pool, lambda pool: pool["running"] == 2 and pool["waiting"] == 2)
    vanish(tight, client)


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
