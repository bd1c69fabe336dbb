"""What one HTTP request is waiting for from the engine.

A call joins the continuations of all its prompts. What the engine adds while nobody reads is merged, so a slow reader
costs no more than its own answer and never holds up others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from isthmus.params import SamplingParams
from isthmus.server.errors import ApiError
from isthmus.server.wire import Piece, Scored, Update


@dataclass(frozen=True)
class Job:
    """One prompt."""

    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


@dataclass
class Times:
    """When things happened, on the monotonic clock; what the latency metrics are made of."""

    arrival: float = field(default_factory=time.monotonic)
    first: float | None = None  # first token
    last: float | None = None  # newest token
    tokens: dict[tuple[str, int], float] = field(default_factory=dict)
    """Newest token of each continuation: by the engine's request id and the index there."""


class Call:
    """Prompts being completed. Iterate over it; close it in any case.

    Choices are numbered over all prompts: `n * prompt + index`.
    """

    def __init__(self, call_id: str, jobs: list[Job], on_close: Callable[[Call], None]) -> None:
        self.call_id = call_id
        self.jobs = jobs
        self.times = Times()
        self.prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
        self.completion_tokens = 0
        self.generated = [0] * len(jobs)  # of those, per prompt
        self.cached_tokens = 0
        self.prompt_logprobs: list[list[list[Scored] | None] | None] = [None] * len(jobs)
        self.receipts: list[dict[str, Any] | None] = [None] * len(jobs)
        self.unstarted = len(jobs) * self.n  # continuations without a token
        self.unfinished = set(range(len(jobs)))
        self.error: ApiError | None = None
        self._on_close = on_close
        self._pending: dict[int, Piece] = {}
        self._news = asyncio.Event()
        self._seen: set[int] = set()  # choices with a token
        self._closed = False

    @property
    def n(self) -> int:
        """Continuations per prompt."""
        return self.jobs[0].params.n

    def request_ids(self) -> list[str]:
        """The engine's names of the prompts that are being served."""
        return [self.request_id(i) for i in self.unfinished]

    def request_id(self, prompt: int) -> str:
        """The engine's name of one prompt."""
        return f"{self.call_id}-{prompt}"

    def push(self, prompt: int, update: Update) -> None:
        """Take in what the engine added."""
        if update.finished:
            self.unfinished.discard(prompt)
            self.receipts[prompt] = update.receipt
        if update.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = update.prompt_logprobs
        for piece in update.pieces:
            piece.index += prompt * self.n
            if piece.index not in self._seen:
                self._seen.add(piece.index)
                self.unstarted -= 1
                self.cached_tokens += update.cached_tokens if piece.index % self.n == 0 else 0
            self.completion_tokens += len(piece.token_ids)
            self.generated[prompt] += len(piece.token_ids)
            waiting = self._pending.get(piece.index)
            if waiting is None:
                self._pending[piece.index] = piece
            else:
                merge(waiting, piece)
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """End it with an error. What was added before is still read first."""
        if self.error is None:
            self.error = error
        self.unfinished.clear()
        self._news.set()

    def close(self) -> None:
        """Nobody reads any more: whatever the engine has not finished is aborted. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
            self.unfinished.clear()
            self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """What was added since the last time, until everything is finished. Raises ApiError when it failed."""
        while not self._closed:
            self._news.clear()
            if self._pending:
                pieces, self._pending = list(self._pending.values()), {}
                yield pieces
            elif self.error is not None:
                raise self.error
            elif not self.unfinished:
                return
            else:
                await self._news.wait()


def merge(first: Piece, more: Piece) -> None:
    """Append what was added later to the same continuation."""
    first.text += more.text
    first.token_ids += more.token_ids
    if more.logprobs is not None:
        first.logprobs = (first.logprobs or []) + more.logprobs
    first.finish_reason, first.stop_reason = more.finish_reason, more.stop_reason


async def collect(call: Call) -> list[Piece]:
    """Everything of every continuation, in order of choices. Raises ApiError when the call failed."""
    whole: dict[int, Piece] = {}
    async for pieces in call:
        for piece in pieces:
            if piece.index in whole:
                merge(whole[piece.index], piece)
            else:
                whole[piece.index] = piece
    return [whole[index] for index in sorted(whole)]
