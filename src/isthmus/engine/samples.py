"""The tokens of a step: which go in, after which a sequence goes on, and which of a prompt are scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import overload

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.rows import Bool, Int64
from isthmus.engine.sequence import Sequence
from isthmus.engine.step import SampleRow, ScoreSpan
from isthmus.params import SamplingParams

GREEDY = 1e-5
"""Temperatures below mean greedy: dividing by them overflows."""


def looks_back(params: SamplingParams) -> bool:
    """Does the choice of a token depend on which tokens came before it, other than through the model?"""
    return (
        params.grammar is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def is_plain(params: SamplingParams) -> bool:
    """Is nothing wanted but the first maximum of the logits as they are (once `min_tokens` are there)?"""
    return params.temperature < GREEDY and params.logprobs is None and not params.logit_bias and not looks_back(params)


def tokens_of(sequences: Items[Sequence], past: Int64, counts: Int64, pending: Bool) -> NDArray[np.int32]:
    """What goes in: each sequence's next `counts[i]` tokens after `past[i]`; -1 for a token that is pending."""
    if np.count_nonzero(pending) == len(pending):
        return np.full(len(pending), -1, np.int32)
    end = np.cumsum(counts)
    tokens = np.full(end[-1], -1, np.int32)
    for i in np.flatnonzero(~pending).tolist():
        n, start = int(counts[i]), int(past[i])
        tokens[end[i] - n : end[i]] = sequences[i].packed(start, start + n)
    return tokens


class Samples(Items[SampleRow]):
    """What a step samples, spelled out when somebody looks: few executors do where all are plain.

    Args:
        sequences: who needs a token.
        rows, index, position: what `SampleRow` has under these names, taken when the step was planned.
    """

    def __init__(self, sequences: Items[Sequence], rows: Int64, index: NDArray[np.int32], position: Int64) -> None:
        self._sequences = sequences
        self._numbers = rows, index, position
        self._made: list[SampleRow] | None = None

    @property
    def indices(self) -> NDArray[np.int32]:
        """The `index` of each."""
        return self._numbers[1]

    @property
    def _samples(self) -> list[SampleRow]:
        if self._made is None:
            numbers = zip(*(array.tolist() for array in self._numbers), strict=True)
            pairs = zip(self._sequences, numbers, strict=True)
            self._made = [_sample_row(sequence, *three) for sequence, three in pairs]
        return self._made

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SampleRow]:
        return iter(self._samples)

    @overload
    def __getitem__(self, index: int) -> SampleRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleRow]: ...
    def __getitem__(self, index: int | slice) -> SampleRow | list[SampleRow]:
        return self._samples[index]


def indices_of(samples: Items[SampleRow]) -> NDArray[np.int32]:
    """The `index` of each, without spelling out what need not be."""
    if isinstance(samples, Samples):
        return samples.indices
    return np.array([sample.index for sample in samples], np.int32)


def score_spans(chunks: Iterable[tuple[Sequence, int, int]]) -> tuple[ScoreSpan, ...]:
    """The prompt tokens of a step that somebody wants the log probabilities of.

    Chunks are `(sequence, n, start)`: its next n tokens are in the step, from `start` on; it has not gone on yet. Of a
    request's continuations, which share the prompt, the first one is asked; once it has output, it was.
    """
    spans: list[ScoreSpan] = []
    for sequence, n, start in chunks:
        top = sequence.request.params.prompt_logprobs
        if top is not None and sequence.index == 0 and not sequence.output:
            first = sequence.past + 1
            targets = sequence.prompt[first : first + n]
            if targets:
                spans.append(ScoreSpan(sequence.request.request_id, first, start, np.array(targets, np.int32), top))
    return tuple(spans)


def _sample_row(sequence: Sequence, row: int, index: int, position: int) -> SampleRow:
    params = sequence.request.params
    return SampleRow(
        row,
        index,
        params,
        sequence.seed,
        position,
        sequence.prompt,
        sequence.output,
        position - len(sequence.prompt) >= params.min_tokens,
        sequence.mask,
    )
