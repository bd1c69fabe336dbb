"""A step from its plan to its results: what the executor is told, and whose the samples are.

take_off    everyone goes on by its tokens; who has none left gets one more, which is pending: it is sampled
land        what was sampled goes to those that have run ever since; rows may have changed hands
events      what there is to tell of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from isthmus.engine.placement import Placement
from isthmus.engine.rows import Bool, Int32, Int64, Rows
from isthmus.engine.running import Running
from isthmus.engine.samples import Samples, score_spans, tokens_of
from isthmus.engine.sequence import Sequence
from isthmus.engine.step import Result, Results, Step
from isthmus.memory import Delta

Event: TypeAlias = tuple[Sequence, Result]
"""One token for one sequence, or a problem instead. Whether it ended the sequence: `sequence.finish_reason`."""


@dataclass(eq=False, slots=True)
class Flight:
    """A step that was handed out and not settled."""

    step: Step
    sampled: list[Sequence]  # owners of `step.samples`
    rows: Int64  # of `sampled`
    owners: Int64  # of those rows, by `Rows.owner`
    computing: list[Sequence]  # those with prompt tokens in it

    @classmethod
    def take_off(
        cls, running: Running, chunks: Int64, placement: Placement, delta: Delta, clock: Callable[[], float]
    ) -> Flight:
        """Those that run go on by `chunks[i]` tokens, whose pages are committed; it counts as done."""
        at, sequences, rows, counts = running.at, list(running), running.rows, chunks
        if np.count_nonzero(chunks) < len(chunks):
            busy = chunks.nonzero()[0]
            sequences, rows, counts = running.some(busy.tolist()), rows[busy], chunks[busy]
        for i in at.begin(rows).tolist():
            sequences[i].stop_waiting(clock())
        past = at.past[rows]
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.add.accumulate(counts, out=query_start[1:])
        chunked = (past < at.prompt[rows]).nonzero()[0].tolist()
        scores = score_spans((sequences[i], int(counts[i]), int(query_start[i])) for i in chunked) if chunked else ()
        tokens = tokens_of(sequences, past, counts, at.pending(rows))
        sampled, owned, samples, plain = _go_on(at, sequences, rows, past + counts, query_start[1:] - 1)
        step = Step(
            delta=delta,
            block_writes=placement.blocks.take_writes(),
            tokens=tokens,
            query_start=query_start,
            past=past.astype(np.int32),
            rows=rows.astype(np.int32),
            samples=samples,
            states=placement.states(rows),
            scores=scores,
            plain=plain,
        )
        return cls(step, sampled, owned, at.owner[owned], [sequences[i] for i in chunked])

    @property
    def has_chunks(self) -> bool:
        """Does it do anything but decode?"""
        return bool(self.computing) or len(self.step.tokens) > len(self.step.rows)

    def here(self, at: Rows) -> Bool:
        """Which of those that it sampled for have run ever since."""
        here: Bool = at.owner[self.rows] == self.owners
        return here

    def land(self, at: Rows, here: Bool, tokens: Int32) -> Int64:
        """The samples of those that are `here` go to them. Returns which are to be looked at: those that may end with
        theirs, and those that are not here."""
        rows, sampled = self.rows, self.sampled
        if np.count_nonzero(here) == len(here):
            odd, full = at.append(rows, tokens)
        else:
            which, odd = here.nonzero()[0], ~here
            rows, tokens, sampled = rows[which], tokens[which], [sampled[i] for i in which.tolist()]
            odd[here], full = at.append(rows, tokens)
        for i in full.nonzero()[0].tolist():
            sampled[i].gather()
        return odd.nonzero()[0]

    def events(self, found: Results, told: Bool) -> list[Event]:
        """Of those that are to be told of."""
        if np.count_nonzero(told) == len(told):
            return list(zip(self.sampled, found, strict=True))
        which = told.nonzero()[0].tolist()
        results = list(found) if which else []
        return [(self.sampled[i], results[i]) for i in which]


def _go_on(
    at: Rows, sequences: list[Sequence], rows: Int64, past: Int64, last: Int32
) -> tuple[list[Sequence], Int64, Samples, bool]:
    """Sequences have gone on to `past`, with token `last[i]` of the step: who samples and in which rows, what, and
    whether all of it is plain."""
    at.past[rows] = past
    length = at.length[rows]
    through = past == length
    if np.count_nonzero(through) < len(through):
        which = through.nonzero()[0]
        sequences = [sequences[i] for i in which.tolist()]
        rows, length, last = rows[which], length[which], last[which]
    at.length[rows] = length + 1
    plain = not np.count_nonzero(length < at.plain_from[rows])
    return sequences, rows, Samples(sequences, rows, last, length), plain
