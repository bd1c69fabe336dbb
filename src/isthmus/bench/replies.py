"""Whole answers of an OpenAI-compatible server to many prompts, so many at a time: what an evaluation needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp

from isthmus.bench.load import Target

_REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


@dataclass(frozen=True)
class Reply:
    """What came of one prompt. Two replies are equal when the answers are."""

    text: str = ""
    tokens: int = 0  # of the answer
    finish_reason: str | None = None
    error: str | None = None
    refused: bool = False  # the request itself is wrong: asking again would not help
    prompt_tokens: int = field(default=0, compare=False)
    cached_tokens: int = field(default=0, compare=False)

    def shown(self) -> dict[str, Any]:
        """The answer, for a result."""
        return {"text": self.text, "tokens": self.tokens, "finish_reason": self.finish_reason}


async def complete_all(
    target: Target,
    prompts: Sequence[str],
    body: Mapping[str, Any],
    concurrency: int,
    note: Callable[[Reply], object],
) -> list[Reply]:
    """`/v1/completions` of every prompt with the fields of `body`; replies in the order of the prompts."""
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, prompt: str) -> Reply:
        async with gate:
            reply = await _complete(session, target, {"model": target.model, "prompt": prompt, **body})
        note(reply)
        return reply

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(headers=target.headers, connector=connector, timeout=timeout) as session:
        return list(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


async def _complete(session: aiohttp.ClientSession, target: Target, body: Mapping[str, Any]) -> Reply:
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            data = await response.json(content_type=None)
            if response.status != HTTPStatus.OK:
                return Reply(error=_message(response.status, data), refused=response.status in _REFUSALS)
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as error:
        return Reply(error=f"{type(error).__name__}: {error}")
    choice, usage = data["choices"][0], data["usage"]
    return Reply(
        text=choice["text"],
        tokens=usage["completion_tokens"],
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def _message(status: int, data: Any) -> str:
    error = data.get("error") if isinstance(data, dict) else None
    text = error.get("message") if isinstance(error, dict) else data
    return f"HTTP {status}: {text!s:.300}"
