"""A load client for any OpenAI-compatible server: streams completions and notes when each piece came.

closed loop   so many requests are under way at all times (`concurrency`)
open loop     requests start at random moments of a given mean rate, whether or not earlier ones have ended (`rate`)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from isthmus.errors import ConfigError


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    output_len: int
    hang_up_after: int | None = None  # close the connection after so many pieces; None: read to the end
    is_counted: bool = False  # ask for each token by itself, so that they can be counted here


@dataclass
class Answer:
    """What came of it. Times are seconds on the client's clock."""

    start: float
    pieces: list[float] = field(default_factory=list)  # when each piece with text or a finish reason came
    end: float = 0.0
    text: str = ""
    tokens: int = 0  # as the server counted them
    received: int = 0  # as they came, if the request is counted
    cached_tokens: int = 0
    done: int = 0  # how many `[DONE]` lines
    error: str | None = None
    hung_up: bool = False

    @property
    def ok(self) -> bool:
        """Complete and proper: no error, exactly one end."""
        return self.error is None and self.done == 1

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces (inter-token latency)."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    url: str  # http://host:port
    model: str
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Authorization, if there is a key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def closed_loop(
    target: Target, asks: Sequence[Ask], concurrency: int, note: Callable[[Answer], None]
) -> list[Answer]:
    """All requests, at most `concurrency` at a time; answers in the order of the requests."""
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, ask: Ask) -> Answer:
        async with gate:
            return await _send(session, target, ask, note)

    async with _session(target) as session:
        return list(await asyncio.gather(*(one(session, ask) for ask in asks)))


async def open_loop(target: Target, asks: Sequence[Ask], rate: float, note: Callable[[Answer], None]) -> list[Answer]:
    """Requests at random (Poisson, seeded) with `rate` a second on average; answers in the order of the requests."""
    delays = np.random.default_rng(0).exponential(1 / rate, len(asks))
    async with _session(target) as session:
        tasks = []
        due = time.perf_counter()
        for ask, delay in zip(asks, delays, strict=True):
            due += delay
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(session, target, ask, note)))
        return list(await asyncio.gather(*tasks))


async def served_model(url: str, api_key: str | None) -> str:
    """The name of the first model a server offers. ConfigError when nobody answers there."""
    target = Target(url, "", api_key)
    try:
        async with _session(target) as session, session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            name: str = (await response.json())["data"][0]["id"]
            return name
    except (aiohttp.ClientError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"--url {url}: no OpenAI-compatible server answers there: {error}") from error


def _session(target: Target) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers=target.headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
    )


async def _send(session: aiohttp.ClientSession, target: Target, ask: Ask, note: Callable[[Answer], None]) -> Answer:
    body = {
        "model": target.model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.is_counted:
        body["logprobs"] = 0
    answer = Answer(time.perf_counter())
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, ask, answer)
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = time.perf_counter()
    note(answer)
    return answer


async def _read(response: aiohttp.ClientResponse, ask: Ask, answer: Answer) -> None:
    async for event in _events(response):
        if event == "[DONE]":
            answer.done += 1
            continue
        chunk: dict[str, Any] = json.loads(event)
        if "error" in chunk:
            answer.error = str(chunk["error"])
            return
        if chunk.get("usage"):
            answer.tokens = chunk["usage"]["completion_tokens"]
            answer.cached_tokens = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in chunk["choices"]:
            answer.pieces.append(time.perf_counter())
            answer.text += choice["text"]
            if ask.is_counted and choice["logprobs"] is not None:
                answer.received += len(choice["logprobs"]["tokens"])
        if ask.hang_up_after is not None and len(answer.pieces) >= ask.hang_up_after:
            answer.hung_up = True
            return


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()
