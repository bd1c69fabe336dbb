"""Which of a step's tokens get logits: those a sequence goes on from, and those whose prompt is scored."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from isthmus.engine.sequence import Sequence
from isthmus.engine.step import SampleRow, ScoreSpan


def sample_row(sequence: Sequence, index: int, length: int) -> SampleRow:
    """The sequence's next token comes from the logits at `index` of the step's tokens."""
    params = sequence.request.params
    return SampleRow(
        sequence.row,
        index,
        params,
        sequence.seed,
        length,
        sequence.prompt,
        sequence.output,
        len(sequence.output) >= params.min_tokens,
        sequence.mask,
    )


def score_spans(sequences: Items[Sequence], counts: Items[int]) -> tuple[ScoreSpan, ...]:
    """The prompt tokens of a step that somebody wants the log probabilities of.

    Sequence i has its next `counts[i]` tokens in the step. Of a request's continuations, which share the prompt, the
    first one is asked; once it has output, it was.
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
