"""Latencies as a client sees them, per continuation."""

from __future__ import annotations

from isthmus.params import SamplingParams
from isthmus.server.app import _pool
from isthmus.server.call import Call, Job
from isthmus.server.engine_client import EngineClient
from isthmus.server.metrics import Metrics
from isthmus.server.wire import GroupStats, ModelInfo, Piece, Stats, Update


def test_latency_between_tokens_is_that_of_one_continuation() -> None:
    """Two prompts of two continuations each, whose tokens come at different moments."""
    metrics = Metrics(lambda: None)
    call = Call("a", [Job([1], SamplingParams(n=2)), Job([2], SamplingParams(n=2))], lambda call: None)

    def add(now: float, prompt: int, *continuations: int, tokens: int = 1) -> None:
        pieces = [Piece(index, "x", [7] * tokens) for index in continuations]
        update = Update(call.request_id(prompt), pieces, False, 0)
        metrics.update(call, update, now)
        call.push(prompt, update)

    def seen() -> tuple[float, float]:
        values = [
            metrics.registry.get_sample_value(f"isthmus:inter_token_latency_seconds_{x}") for x in ("count", "sum")
        ]
        assert values[0] is not None
        assert values[1] is not None
        return values[0], values[1]

    add(10.0, 0, 0, 1)
    add(10.5, 1, 0)
    assert seen() == (0, 0), "each got its first token"
    add(12.0, 0, 0, 1)
    assert seen() == (2, 4.0)
    add(12.0, 1, 0)
    assert seen() == (3, 5.5)
    add(13.0, 1, 0, tokens=0)  # text that was held back
    add(14.0, 1, 0)
    assert seen() == (4, 7.5)


def test_memory_of_graphs_is_told_beside_the_arena() -> None:
    """In the metrics and in `/v1/pool`, and no part of what sums to the arena."""
    group = GroupStats("full", 64, live_pages=2, cached_pages=0, hole_pages=1, lo_byte=64, hi_byte=256, moved_pages=0,
                       evicted_pages=0, table_entries=9)  # fmt: skip
    stats = Stats(running=1, waiting=0, total=320, null=64, gap=64, tail=0, groups=[group], ids=2, id_capacity=8,
                  steps=3, preemptions=0, refusals=0, graph_bytes=7 << 20)  # fmt: skip
    metrics = Metrics(lambda: stats)
    assert metrics.registry.get_sample_value("isthmus:graph_bytes") == 7 << 20
    client = EngineClient({}, metrics, max_queue=1, request_timeout=1.0)
    client.stats, client.state, client.info = stats, "ready", ModelInfo("tiny", "", None, {}, [], 300, 2048, 2)
    assert _pool(client)["graph_bytes"] == 7 << 20
