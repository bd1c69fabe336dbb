"""The parts of a call that a real server shows only by accident of timing."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.params import SamplingParams
from isthmus.server.call import Call, Job, collect
from isthmus.server.engine_client import EngineClient
from isthmus.server.errors import ApiError
from isthmus.server.metrics import Metrics
from isthmus.server.structured import ToolParser
from isthmus.server.wire import Piece, Update


def update(prompt: int, *pieces: Piece, finished: bool = False) -> Update:
    return Update(f"c-{prompt}", list(pieces), finished, 0)


def test_what_nobody_reads_is_merged() -> None:
    async def run() -> None:
        call = Call("c", [Job([1], SamplingParams(n=2))] * 2, lambda call: None)
        for i in range(1000):
            for prompt in (0, 1):
                ends = i == 999
                reason = "length" if ends else None
                pieces = [Piece(j, f"{j}", [i], finish_reason=reason) for j in (0, 1)]
                call.push(prompt, update(prompt, *pieces, finished=ends))
        batches = [pieces async for pieces in call]
        assert len(batches) == 1, "one piece per choice, however long the reader slept"
        assert [piece.index for piece in batches[0]] == [0, 1, 2, 3]
        assert [piece.text for piece in batches[0]] == ["0" * 1000, "1" * 1000] * 2
        assert all(piece.token_ids == list(range(1000)) for piece in batches[0])
        assert all(piece.finish_reason == "length" for piece in batches[0])
        assert call.completion_tokens == 4000

    asyncio.run(run())


def test_what_came_before_an_error_is_read_first() -> None:
    async def run() -> None:
        call = Call("c", [Job([1], SamplingParams())], lambda call: None)
        call.push(0, update(0, Piece(0, "a", [1])))
        call.fail(ApiError(503, "dead"))
        pieces = aiter(call)
        assert [piece.text for piece in await anext(pieces)] == ["a"]
        with pytest.raises(ApiError, match="dead"):
            await anext(pieces)
        with pytest.raises(ApiError):
            await collect(call)

    asyncio.run(run())


def test_a_closed_call_ends_its_reader() -> None:
    async def run() -> None:
        closed: list[list[str]] = []
        call = Call("c", [Job([1], SamplingParams())] * 2, lambda call: closed.append(call.request_ids()))
        reader = asyncio.create_task(collect(call))
        await asyncio.sleep(0)
        call.push(1, update(1, Piece(0, "a", [1]), finished=True))
        await asyncio.sleep(0)
        call.close()
        call.close()
        await reader
        assert closed == [["c-0"]], "only what has not ended is aborted, and once"

    asyncio.run(run())


class FakeProcess:
    def __init__(self) -> None:
        self.orders: list[object] = []

    def send(self, order: object) -> None:
        self.orders.append(order)


def test_a_call_that_takes_too_long_is_aborted() -> None:
    async def run() -> None:
        client = EngineClient({}, Metrics(lambda: None), max_queue=4, request_timeout=0.001)
        process = FakeProcess()
        client._process, client.state, client.info = process, "ready", object()  # type: ignore[assignment]
        call = client.submit("c", [Job([1], SamplingParams())] * 2)
        with pytest.raises(ApiError) as caught:
            await collect(call)
        assert caught.value.status == 408
        assert [type(order).__name__ for order in process.orders] == ["Submit"] * 2 + ["Abort"] * 2
        call.close()
        assert len(process.orders) == 4
        assert client.in_flight == 0

    asyncio.run(run())


CALLS = (
    'I look.<tool_call>\n{"name": "get", "arguments": {"a": "}\\n</tool_call>", "b": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_told_apart_however_the_text_is_cut(size: int) -> None:
    parser = ToolParser()
    content, names, arguments = "", [], ["", ""]
    for start in range(0, len(CALLS), size):
        text, calls = parser.push(CALLS[start : start + size], last=start + size >= len(CALLS))
        content += text
        for call in calls:
            names += [call.name] if call.name else []
            arguments[call.index] += call.arguments
    assert content == "I look."
    assert names == ["get", "put"]
    assert arguments == ['{"a": "}\\n</tool_call>", "b": [1, 2]}', "{}"]


@pytest.mark.parametrize("text", ["a < b", "<tool", "x <tool_call> y", "", "<tool_call>\n{"])
def test_text_that_is_no_call_stays_text(text: str) -> None:
    parser = ToolParser()
    content = "".join(parser.push(character, last=False)[0] for character in text)
    content += parser.push("", last=True)[0]
    assert content == text
    assert parser.count == 0
