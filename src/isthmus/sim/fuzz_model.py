"""The model of a fuzzed run: its next token is a pure function of all tokens before it, so every run has one answer.

    mark[i]   names tokens [0, i] and the salt: what slot i of the sequence holds, and its state after i + 1 tokens
    truth     the tokens that a sequence must have at its end, their marks, and why it ends

Prompts are told as pieces, so that they read well, share prefixes, and branch where pieces begin to differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.sequence import FinishReason
from isthmus.engine.sequence import Sequence as Seq

SAYS = -1
Piece: TypeAlias = tuple[int, int]
"""`(book, n)`: the book's tokens for the next n positions; `(SAYS, n)`: what the model itself says next, unseeded."""

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Truth:
    """What comes of one sequence, if nothing ends it from outside."""

    name: str  # "r3.0": the second part tells the continuations of a request apart
    tokens: NDArray[np.int64]  # prompt and output
    marks: NDArray[np.uint64]  # [tokens]
    reason: FinishReason
    stop_reason: int | None


def tokens_of(pieces: Sequence[Piece], vocab: int) -> list[int]:
    """The prompt that these pieces tell."""
    tokens: list[int] = []
    value = _START
    for book, n in pieces:
        for _ in range(n):
            token = _say(value if book == SAYS else _mix(_mix(_START + 1, book), len(tokens)), None, vocab)
            tokens.append(token)
            value = _mix(value, token)
    return tokens


def truth_of(sequence: Seq, vocab: int, eos: Collection[int]) -> Truth:
    """What the model makes of a sequence that was just queued."""
    params, salt = sequence.request.params, sequence.request.cache_salt
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    tokens, marks, value = list(sequence.prompt), [], _START
    for token in tokens:
        value = _mix(value, token)
        marks.append(value)
    reason: FinishReason = "length"
    stop_reason = None
    for i in range(sequence.limit):
        token = _say(value, sequence.seed, vocab)
        while i < params.min_tokens and token in ends:
            token = (token + 1) % vocab
        tokens.append(token)
        value = _mix(value, token)
        marks.append(value)
        if token in ends:
            reason = "stop"
            stop_reason = None if token in eos and not params.ignore_eos else token
            break
    name = f"{sequence.request.request_id}.{sequence.index}"
    key = np.uint64(_mix(_START + 2, sum(map(ord, salt or ""))))
    return Truth(name, np.array(tokens, np.int64), np.array(marks, np.uint64) ^ key, reason, stop_reason)


def _mix(value: int, token: int) -> int:
    value = (value * 6364136223846793005 + token + 1442695040888963407) & _MASK
    return value ^ (value >> 29)


def _say(value: int, seed: int | None, vocab: int) -> int:
    value = _mix(value, seed or 0)
    return (value >> 17) % vocab
