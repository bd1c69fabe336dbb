"""Answers from a running server with OpenAI's chat API."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from isthmus.chat.turns import Message, Piece, TooLongError
from isthmus.endpoint import Endpoint, RefusedError
from isthmus.errors import IsthmusError, ModelError
from isthmus.params import SamplingParams

_SILENCE = 600.0  # seconds without a byte after which a server counts as gone: a request may queue for long


class ServerSpeaker:
    """One model of a server.

    Args:
        name: the model; None: the first that the server offers.
        params: of every answer; what is at its default is left to the server, which may know nothing of it.

    ConfigError if nobody answers there, or not to its key.
    """

    def __init__(self, endpoint: Endpoint, name: str | None, params: SamplingParams) -> None:
        self._endpoint = endpoint
        offer = endpoint.offer(name)
        self._body = {"model": offer.name} | _body(params)
        longest = "" if offer.max_model_len is None else f", up to {offer.max_model_len:,} tokens"
        self.greeting = f"{offer.name} on {endpoint.url}{longest}"

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """See `Speaker`."""
        body = self._body | {"messages": list(messages)}
        try:
            with closing(self._endpoint.events("/v1/chat/completions", body, _SILENCE)) as events:
                for event in events:
                    try:
                        piece = _piece(event)
                    except (TypeError, AttributeError, KeyError, IndexError) as error:
                        raise IsthmusError(f"{self._endpoint.url}: its events are not those of OpenAI's API") from error
                    yield piece
        except RefusedError as error:
            if error.code == "context_length_exceeded":
                raise TooLongError(error.text) from error
            if error.code == "no_chat_template":
                raise ModelError(f"{error}: complete plain text with isthmus generate") from error
            raise


def _body(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults, by OpenAI's names and those that servers share beyond them."""
    found: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "max_tokens":  # OpenAI's has no default
            found |= {} if value is None else {"max_tokens": value}
        elif value not in (field.default, None, (), {}):
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _piece(event: dict[str, Any]) -> Piece:
    """Text, or the counts at its end."""
    if "error" in event:
        error = event["error"]
        text = str(error.get("message") if isinstance(error, dict) else error)
        raise IsthmusError(f"the server ended the answer: {' '.join(text.split()):.300}")
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    choice = (event.get("choices") or [{}])[0]
    return Piece(
        str((choice.get("delta") or {}).get("content") or ""),
        usage.get("prompt_tokens"),
        details.get("cached_tokens"),
        usage.get("completion_tokens"),
        choice.get("finish_reason"),
    )
