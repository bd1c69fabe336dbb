"""A step without some of its sequences, and deltas without entries that nobody can carry out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.step import BlockWrites, Result, Sampled, Step
from isthmus.memory import Delta, Op

Bool = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is left of a step, and how its results become those of the whole step."""

    step: Step
    samples: tuple[int, ...]  # of the whole step, those that are left
    scores: tuple[int, ...]
    whole: Step

    @classmethod
    def of(cls, step: Step, gone: Bool) -> Cut:
        """Without the sequences where `gone` is set; the delta and the block writes stay."""
        counts = np.diff(step.query_start)
        kept = np.repeat(~gone, counts)
        before: NDArray[np.int64] = np.cumsum(~kept) - ~kept  # tokens left out before each token
        owner = np.repeat(np.arange(len(counts)), counts)
        samples = [i for i, sample in enumerate(step.samples) if not gone[owner[sample.index]]]
        scores = [i for i, span in enumerate(step.scores) if not gone[owner[span.start]]]
        start = np.zeros(int((~gone).sum()) + 1, np.int32)
        np.cumsum(counts[~gone], out=start[1:])
        left = dataclasses.replace(
            step,
            tokens=step.tokens[kept],
            query_start=start,
            past=step.past[~gone],
            rows=step.rows[~gone],
            states=step.states[~gone] if len(step.states) else step.states,
            samples=[
                dataclasses.replace(step.samples[i], index=step.samples[i].index - int(before[step.samples[i].index]))
                for i in samples
            ],
            scores=tuple(
                dataclasses.replace(step.scores[i], start=step.scores[i].start - int(before[step.scores[i].start]))
                for i in scores
            ),
        )
        return cls(left, tuple(samples), tuple(scores), step)

    def results(self, left: Sequence[Result]) -> list[Result]:
        """One for each sample and target of the whole step. What nobody computed is for sequences that have ended, so
        that it does not matter."""
        results: list[Result] = [0] * len(self.whole.samples)
        for i, result in zip(self.samples, left, strict=False):
            results[i] = result
        at = len(self.samples)
        for i, span in enumerate(self.whole.scores):
            n = len(span.targets)
            if i in self.scores:
                results += left[at : at + n]
                at += n
            else:
                results += [Sampled(target, 0.0, 1) for target in span.targets.tolist()]
        return results


def joined(first: Step, second: Step) -> Step:
    """The second step, with the delta and the block writes of the first one before its own."""
    delta = Delta([*first.delta.ops, *second.delta.ops])
    a, b = first.block_writes, second.block_writes
    pairs = ((a.row, b.row), (a.column, b.column), (a.virtual, b.virtual))
    return dataclasses.replace(second, delta=delta, block_writes=BlockWrites(*map(np.concatenate, pairs)))


def entries(op: Op, kept: Bool) -> Op:
    """Some entries of an operation."""
    arrays = {field.name: getattr(op, field.name)[kept] for field in dataclasses.fields(op) if field.name != "group"}
    return dataclasses.replace(op, **arrays)
