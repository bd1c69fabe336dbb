"""Latencies as a client sees them, per continuation."""

from __future__ import annotations

from isthmus.params import SamplingParams
from isthmus.server.call import Call, Job
from isthmus.server.metrics import Metrics
from isthmus.server.wire import Piece, Update


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
