"""The prefix cache as a client sees it: a hit, its receipt, and what the metrics make of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from isthmus.engine.receipt import Receipt
from tests.server.running import Server


def fresh(seed: int, count: int) -> list[int]:
    """Token ids that no other test of this server has sent. Two of the model's three layers have a window of 8."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 250, count).tolist()
    return ids


def ask(server: Server, path: str, body: dict[str, Any], stream: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What came last, or all there is, and the chunks before it."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.http.post(path, json=body | options)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json(), []
    chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]
    return chunks[-1], chunks[:-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_receipt_comes_with_the_end_if_it_is_asked_for(server: Server, path: str, stream: bool) -> None:
    question = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "the cat sat on it"}
    body = question | {"max_tokens": 4, "ignore_eos": True}
    end, before = ask(server, path, body | {"isthmus": {"receipt": True}}, stream)
    receipt = end["isthmus"]["receipt"]
    assert set(receipt) == {spec.name for spec in dataclasses.fields(Receipt)}
    assert receipt["prompt_tokens"] == end["usage"]["prompt_tokens"]
    assert receipt["cached_tokens"] == end["usage"]["prompt_tokens_details"]["cached_tokens"]
    sizes = {group["name"]: group["page_bytes"] for group in server.pool()["groups"]}
    assert receipt["bytes"] == sum(count * sizes[name] for name, count in receipt["pages"].items()) > 0
    assert all("isthmus" not in chunk for chunk in before)
    if stream:
        assert end["choices"] == []
    assert "isthmus" not in ask(server, path, body, stream)[0]


def test_the_same_prefix_is_served_from_the_cache_though_most_layers_have_windows(server: Server) -> None:
    prompt = fresh(71, 61)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "isthmus": {"receipt": True}}
    before = server.metrics()
    first, second = (ask(server, "/v1/completions", body, False)[0] for _ in range(2))
    after = server.metrics()
    assert first["choices"] == second["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, 60], "all full pages, though a window of 8 has long passed the first ones"
    receipt = second["isthmus"]["receipt"]
    assert receipt["restorable"] == {"full": 60, "window": 60}
    assert receipt["cut_by"] is None
    assert receipt["pages"]["full"] < first["isthmus"]["receipt"]["pages"]["full"]
    gained = {name: after[f"isthmus:{name}"] - before.get(f"isthmus:{name}", 0) for name in (
        "prefix_cache_hits_total", "prefix_cache_queries_total",
    )}  # fmt: skip
    assert gained == {"prefix_cache_hits_total": 60, "prefix_cache_queries_total": 122}


def test_what_cut_a_hit_and_what_was_waited_for_are_counted(server: Server) -> None:
    """A second prompt that leaves the first one half way: the window there is gone, the third one finds it."""
    stem = fresh(72, 40)
    cuts = 'isthmus:prefix_cache_cuts_total{group="window"}'
    before = server.metrics()
    receipts = []
    for tail in (73, 74, 75):
        body = {"prompt": stem + fresh(tail, 24), "max_tokens": 2, "isthmus": {"receipt": True}}
        receipts.append(ask(server, "/v1/completions", body, False)[0]["isthmus"]["receipt"])
    after = server.metrics()
    assert [receipt["cut_by"] for receipt in receipts] == [None, "window", None]
    assert [receipt["cached_tokens"] for receipt in receipts] == [0, 0, 40]
    assert receipts[1]["known_tokens"] == receipts[1]["restorable"]["full"] == 40
    assert receipts[1]["restorable"]["window"] < 40
    assert after[cuts] - before.get(cuts, 0) == 1
    waited = {name for name in after if name.startswith("isthmus:request_wait_seconds_total")}
    total = sum(after[name] - before.get(name, 0) for name in waited)
    assert total == pytest.approx(sum(sum(receipt["waited_for"].values()) for receipt in receipts))
    assert all(sum(receipt["waited_for"].values()) == pytest.approx(receipt["waited_seconds"]) for receipt in receipts)
