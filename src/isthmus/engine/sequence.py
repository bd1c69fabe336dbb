"""What the scheduler knows of a request: its sequences, their tokens and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Literal

import numpy as np

from isthmus.cache.names import Names
from isthmus.cache.prefix import Match
from isthmus.engine.receipt import Receipt
from isthmus.engine.rows import FAR, Int32, Rows
from isthmus.engine.step import TokenMask
from isthmus.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Status(Enum):
    """Where a sequence stands. Only a running one has a row and pages."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its tokens are kept, its pages are not
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's `n` continuations.

    [0, known)        tokens that are here: prompt + output
    [known, length)   tokens that steps in flight choose: pending; there are at most prompt + limit in all
    [0, past)         cached, by what is in flight at the latest; [past, length) are still to go through the model
    """

    request: Request
    index: int  # among the request's sequences
    order: tuple[int, int]  # (arrival of the request, index): smaller is older
    seed: int | None  # base of its draws; None: unseeded
    limit: int  # output tokens at most
    prompt: list[int]  # shared with the request and never changed
    looks_back: bool = False  # its next token cannot be chosen while one is pending
    plain: bool = False  # its tokens are first maxima of the logits as they are, once it may end
    ends: frozenset[int] = frozenset()  # tokens that end it, once it may
    most_cached: int = field(init=False)  # tokens it can ever have cached: the last one it is given is never fed back
    status: Status = Status.WAITING
    row: int = -1  # of the block table, -1 while it does not run
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    names: Names | None = None  # of its full pages, for the prefix cache; made when it first starts
    match: Match | None = None  # what was found when it was looked up last, while it waits
    matched: int = 0  # of so many tokens
    cold: bool = False  # what is cached of it must not be used
    queued: float | None = None  # on the scheduler's clock, since when it waits; None while it runs
    waited_for: str | None = None  # what kept it when it stood at the front
    mask: TokenMask | None = None  # which tokens its grammar lets it go on with
    at: Rows | None = field(default=None, repr=False)  # where it stands, by row, while it runs
    _output: list[int] = field(default_factory=list, repr=False)  # but for the newest, which its row has
    _length: int = field(init=False, repr=False)  # while it does not run

    def __post_init__(self) -> None:
        self._length = self.known
        self.most_cached = len(self.prompt) + self.limit - 1

    def enter(self, rows: Rows, row: int, past: int, cuts: tuple[int, ...]) -> None:
        """It runs from now on, in that row, with `past` tokens cached; its prefill chunks end at `cuts` (two at most)
        besides, so that somebody can come back there."""
        prompt = len(self.prompt)
        plain_from = prompt + self.request.params.min_tokens if self.plain else FAR
        told = not self.request.at_end
        rows.take(
            row, past, self._length, prompt, self.most_cached, plain_from, self.looks_back, cuts,
            told=told, ends=self.ends,
        )  # fmt: skip
        self.row, self.at = row, rows

    def leave(self) -> None:
        """It runs no more."""
        assert self.at is not None
        self.gather()
        self._length = self.length
        self.at.give(self.row)
        self.row, self.at = -1, None

    def gather(self) -> None:
        """Take the newest tokens out of the row, which has room for a few."""
        if self.at is not None:
            self._output += self.at.gather(self.row)

    @property
    def output(self) -> list[int]:
        """Output tokens that are here: always the same list, which is behind until it is asked for."""
        self.gather()
        return self._output

    @property
    def past(self) -> int:
        """Tokens cached; changed by `Scheduler.schedule` alone."""
        return 0 if self.at is None else int(self.at.past[self.row])

    @property
    def length(self) -> int:
        """Tokens it has: prompt, output and pending; changed by `Scheduler.schedule` alone."""
        return self._length if self.at is None else int(self.at.length[self.row])

    @property
    def known(self) -> int:
        """Tokens whose ids are here."""
        return len(self.prompt) + len(self._output) if self.at is None else int(self.at.known[self.row])

    @property
    def has_pending(self) -> bool:
        """Is a token in flight?"""
        return self.length > self.known

    @property
    def is_complete(self) -> bool:
        """Is its last token, by length, in flight? (It ends when that is here.)"""
        return self.length > self.most_cached

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) of prompt and output together, end <= known."""
        n = len(self.prompt)
        if end <= n:
            return self.prompt[start:end]
        return self.prompt[start:] + self.output[max(0, start - n) : end - n]

    def packed(self, start: int, end: int) -> Int32:
        """The same as an array."""
        if end <= len(self.prompt):
            return self.request.packed[start:end]
        return np.array(self.tokens(start, end), np.int32)

    def stop_waiting(self, now: float) -> None:
        """It is in for a step: what it waited is final, and for what it did when it last stood at the front."""
        assert self.queued is not None
        receipt, waited, reason = self.request.receipt, now - self.queued, self.waited_for or "queue"
        receipt.waited_seconds += waited
        receipt.waited_for[reason] = receipt.waited_for.get(reason, 0.0) + waited
        self.queued, self.waited_for = None, None


@dataclass(eq=False, slots=True)
class Request:
    """What a client asked for. `Scheduler.add` makes its sequences."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None  # requests share cached prefixes with those of the same salt alone
    prompt: str | None = None  # the text that the tokens came from, for the outputs
    at_end: bool = False  # nobody wants to hear of a token before its sequence has ended
    sequences: list[Sequence] = field(default_factory=list)
    receipt: Receipt = field(default_factory=Receipt)
    packed: Int32 = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)  # the prompt, once it was added

    @property
    def is_finished(self) -> bool:
        """All its sequences have ended. False before it was added."""
        return bool(self.sequences) and all(s.status is Status.FINISHED for s in self.sequences)


def sequence_seed(seed: int | None, index: int) -> int | None:
    """The base seed of a request's index-th sequence: the same in every run, different for each of the `n`."""
    if seed is None:
        return None
    return int.from_bytes(blake2b(b"%d/%d" % (seed, index), digest_size=7).digest(), "little")
