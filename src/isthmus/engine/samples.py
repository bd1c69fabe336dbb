"""The tokens of a step: which go in, after which a sequence goes on, and which of a prompt are scored."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from isthmus.engine.sequence import Sequence
from isthmus.engine.step import SampleRow, ScoreSpan
from isthmus.params import SamplingParams


def looks_back(params: SamplingParams) -> bool:
    """Does the choice of a token depend on which tokens came before it, other than through the model?"""
    return (
        params.grammar is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def go_on(sequences: Items[Sequence], counts: Items[int]) -> tuple[list[int], list[SampleRow], list[Sequence]]:
    """Move each sequence on by its count: `(tokens that go in, what is sampled, for which of them)`.

    A token that is not here yet goes in as -1. Who is sampled for has one token more, which is pending.
    """
    tokens: list[int] = []
    samples: list[SampleRow] = []
    sampled: list[Sequence] = []
    for sequence, n in zip(sequences, counts, strict=True):
        past, output = sequence.past, sequence.output
        at = past - len(sequence.prompt)
        if n == 1 and at >= 0:
            tokens.append(output[at] if at < len(output) else -1)
        else:
            tokens += sequence.tokens(past, past + n)
        sequence.past = past = past + n
        if past == sequence.length:
            samples.append(_sample_row(sequence, len(tokens) - 1))
            sampled.append(sequence)
            sequence.length += 1
    return tokens, samples, sampled


def score_spans(sequences: Items[Sequence], counts: Items[int]) -> tuple[ScoreSpan, ...]:
    """The prompt tokens of a step that somebody wants the log probabilities of.

    Sequence i has its next `counts[i]` tokens in the step, and has not gone on yet. Of a request's continuations, which
    share the prompt, the first one is asked; once it has output, it was.
    """
    spans: list[ScoreSpan] = []
    start = 0
    for sequence, n in zip(sequences, counts, strict=True):
        top = sequence.request.params.prompt_logprobs
        if top is not None and sequence.index == 0 and not sequence.output:
            targets = sequence.prompt[sequence.past + 1 : sequence.past + n + 1]
            if targets:
                request_id = sequence.request.request_id
                spans.append(ScoreSpan(request_id, sequence.past + 1, start, np.array(targets, np.int32), top))
        start += n
    return tuple(spans)


def _sample_row(sequence: Sequence, index: int) -> SampleRow:
    params, length = sequence.request.params, sequence.length
    return SampleRow(
        sequence.row,
        index,
        params,
        sequence.seed,
        length,
        sequence.prompt,
        sequence.output,
        length - len(sequence.prompt) >= params.min_tokens,
        sequence.mask,
    )
