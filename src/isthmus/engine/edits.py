"""What changes single logits of a step's rows before a choice, as flat arrays: one entry per row and token.

The order is that of `isthmus.engine.sampler`: logit_bias, min_tokens, penalties. (The grammar's mask, which is last,
takes whole rows and is not here.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.step import SampleRow

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Edits:
    """Edits of the rows of a `[S, vocab_size]` array of logits, no two of one place."""

    keys: Int64  # [n], ascending: row * vocab_size + token
    change: Float32  # [n, 3]: bias (-infinity: the token cannot come), penalty of a repetition, what is subtracted

    @classmethod
    def of(cls, samples: Sequence[SampleRow], eos: Collection[int], vocab_size: int) -> Edits:
        """IndexError for a token of a bias, prompt or output that the vocabulary does not have."""
        params = [sample.params for sample in samples]
        bias = _keys([p.logit_bias for p in params], vocab_size)
        values = np.fromiter(chain.from_iterable(p.logit_bias.values() for p in params), np.float64, len(bias))
        ends = _keys([_ends(sample, eos, vocab_size) for sample in samples], vocab_size)
        repeats = [sample for sample in samples if sample.params.repetition_penalty != 1.0]
        seen = ends[:0]
        if repeats:
            prompts = [s.prompt if s.params.repetition_penalty != 1.0 else () for s in samples]
            outputs = [s.output if s.params.repetition_penalty != 1.0 else () for s in samples]
            seen, _ = _distinct(np.concatenate((_keys(prompts, vocab_size), _keys(outputs, vocab_size))))
        counted = [s.output if s.params.presence_penalty or s.params.frequency_penalty else () for s in samples]
        output, counts = _distinct(_keys(counted, vocab_size))

        keys, _ = _distinct(np.concatenate((bias, ends, seen, output)))
        change = np.zeros((len(keys), 3), np.float32)
        change[np.searchsorted(keys, bias), 0] = np.clip(values, -_LARGEST, _LARGEST)
        change[np.searchsorted(keys, ends), 0] = -np.inf
        change[:, 1] = 1.0
        change[np.searchsorted(keys, seen), 1] = _column([p.repetition_penalty for p in params])[seen // vocab_size]
        row = output // vocab_size
        frequency, presence = (
            _column([p.frequency_penalty for p in params]),
            _column([p.presence_penalty for p in params]),
        )
        change[np.searchsorted(keys, output), 2] = frequency[row] * counts.astype(np.float32) + presence[row]
        return cls(keys, change)


def _ends(sample: SampleRow, eos: Collection[int], vocab_size: int) -> list[int]:
    """Tokens that would end the sequence while `min_tokens` holds the end back."""
    if sample.allow_eos:
        return []
    return [token for token in (*eos, *sample.params.stop_token_ids) if 0 <= token < vocab_size]


def _keys(tokens: Sequence[Collection[int]], vocab_size: int) -> Int64:
    """Keys of the tokens of each row, in order."""
    lengths = [len(row) for row in tokens]
    flat = np.fromiter(chain.from_iterable(tokens), np.int64, sum(lengths))
    wrong = (flat < 0) | (flat >= vocab_size)
    if wrong.any():
        raise IndexError(f"token {int(flat[wrong][0])} is not in the vocabulary, 0..{vocab_size - 1}")
    return np.repeat(np.arange(len(tokens)) * vocab_size, lengths) + flat


def _distinct(keys: Int64) -> tuple[Int64, Int64]:
    """Ascending, and how often each is there. With counts NumPy sorts; without it hashes, 70 times as long here."""
    distinct, counts = np.unique(keys, return_counts=True)
    return distinct, counts


def _column(values: Sequence[float]) -> Float32:
    return np.array(values, np.float32)
