"""`/v1/chat/completions`: a conversation in, the assistant's next messages out, whole or as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from isthmus.errors import ConfigError
from isthmus.server import conversation
from isthmus.server.answer import Identity, ending, receipts, usage
from isthmus.server.call import Call, Job, collect
from isthmus.server.completions import checked_job, invalid
from isthmus.server.logprobs import chat_logprobs
from isthmus.server.protocol import ChatRequest
from isthmus.server.reply import event, to_json
from isthmus.server.speller import Speller
from isthmus.server.structured import CallPart, ToolParser, active_tools, grammar_of
from isthmus.server.wire import Piece

KIND = "chat.completion"


async def jobs(request: ChatRequest, speller: Speller) -> list[Job]:
    """The conversation as one prompt, and how it is sampled. ApiError 400 for what can never be served."""
    # Grammars that are not valid are found before a template is rendered, and may take long.
    grammar = await speller.aside(lambda: grammar_of(request))
    ids = await conversation.render(speller, request.messages, active_tools(request), request.chat_template_kwargs)
    try:
        params = request.sampling(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            grammar=grammar,
        )
    except ConfigError as error:
        raise invalid(error) from None
    return [checked_job(Job(ids, params, request.cache_salt), speller.info, "messages")]


class _Choice:
    """One continuation on its way out."""

    def __init__(self, request: ChatRequest, index: int) -> None:
        self._index = index
        self._count = (request.top_logprobs or 0) if request.logprobs else None
        self._parser = ToolParser() if active_tools(request) else None
        self._is_new = True

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """The `choices` entries of the chunks for what the engine added."""
        content, calls = self._split(piece)
        entries = [self._entry({"role": "assistant", "content": ""})] if self._is_new else []
        self._is_new = False
        logprobs = None if self._count is None else chat_logprobs(piece.logprobs or [], self._count)
        if content or (logprobs and not calls):
            entries.append(self._entry({"content": content}, logprobs))
        entries += [self._entry({"tool_calls": [_delta(call)]}) for call in calls]
        if piece.finish_reason is not None:
            entries.append(self._entry({}) | {"finish_reason": self._reason(piece), "stop_reason": piece.stop_reason})
        return entries

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The `choices` entry of a complete answer."""
        content, parts = self._split(piece)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not parts else None}
        if parts:
            message["tool_calls"] = [_joined(parts, i) for i in range(self._parser.count if self._parser else 0)]
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._count is None else chat_logprobs(piece.logprobs or [], self._count),
            "finish_reason": self._reason(piece),
            "stop_reason": piece.stop_reason,
        }

    def _split(self, piece: Piece) -> tuple[str, list[CallPart]]:
        if self._parser is None:
            return piece.text, []
        return self._parser.push(piece.text, last=piece.finish_reason is not None)

    def _reason(self, piece: Piece) -> str | None:
        called = self._parser is not None and self._parser.count > 0
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _entry(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _delta(call: CallPart) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _joined(parts: list[CallPart], index: int) -> dict[str, Any]:
    mine = [part for part in parts if part.index == index]
    function = {"name": mine[0].name, "arguments": "".join(part.arguments for part in mine)}
    return {"id": mine[0].id, "type": "function", "function": function}


async def stream(request: ChatRequest, call: Call, identity: Identity) -> AsyncIterator[bytes]:
    """Events: the role, deltas per choice, usage if it was asked for, `[DONE]`."""
    choices: dict[int, _Choice] = {}
    tail = {"usage": None} if request.include_usage else {}
    kind = KIND + ".chunk"
    async for pieces in call:
        events = []
        for piece in pieces:
            if piece.index not in choices:
                choices[piece.index] = _Choice(request, piece.index)
            events += [event(identity.envelope(kind, [entry]) | tail) for entry in choices[piece.index].deltas(piece)]
        if events:
            yield b"".join(events)
    yield ending(kind, call, identity, request, usage(call))


async def whole(request: ChatRequest, call: Call, identity: Identity) -> AsyncIterator[bytes]:
    """The one body."""
    choices = [_Choice(request, piece.index).whole(piece) for piece in await collect(call)]
    body = identity.envelope(KIND, choices) | {"usage": usage(call)}
    yield to_json(body | ({"isthmus": receipts(call)} if request.wants_receipt else {}))
