"""Who of those that wait starts, beside whom.

    waiting    by age: a smaller `Sequence.order` goes first
    oldest     the oldest of all runs whatever the others hold: it fits alone, and they make room
    admit      as many more as fit beside those that run (`Room.fits_ahead`), oldest first
    run        a row, and whatever of it is cached

Nothing is done for those that are refused, which most are, step after step: they are priced as they stand. What was
found out about them is kept by themselves (`Sequence.match`) and by the room (`Room.newcomer`), and holds until
something changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isthmus.cache.prefix import Match
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.placement import Placement
from isthmus.engine.room import Newcomer, Room
from isthmus.engine.rows import Int64
from isthmus.engine.running import Running
from isthmus.engine.sequence import Sequence, Status
from isthmus.engine.sharing import Sharing


class Waiting:
    """Sequences that wait to start, oldest first."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        """It waits from now on, in its place by age."""
        if not self._queue or self._queue[-1].order < sequence.order:  # most are the youngest
            self._queue.append(sequence)
            return
        self._queue.insert(bisect_left(self._queue, sequence.order, key=lambda other: other.order), sequence)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more. ValueError if it did not."""
        self._queue.remove(sequence)

    def drop_finished(self) -> None:
        """Those that have ended wait no more."""
        if any(sequence.status is Status.FINISHED for sequence in self._queue):
            self._queue = deque(sequence for sequence in self._queue if sequence.status is not Status.FINISHED)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __getitem__(self, index: int) -> Sequence:
        return self._queue[index]


@dataclass(frozen=True, slots=True)
class Admission:
    """The step from waiting to running, between parts of a scheduler; it keeps nothing itself."""

    config: SchedulerConfig
    waiting: Waiting
    running: Running
    placement: Placement
    room: Room
    sharing: Sharing

    def oldest(self) -> None:
        """The oldest of all runs whether it fits beside the others or not."""
        first = self.waiting[0]
        if len(self.running) == self.config.max_num_seqs or first.has_pending:
            return
        if not self.running or first.order < self.running[0].order:
            self.sharing.catch_up(self.running)
            self._start(first, self.sharing.match(first))

    def admit(self, chunks: Int64, budget: int) -> Int64:
        """Let the oldest waiting sequences run, as many as fit beside those that do. Returns everyone's tokens.

        They are admitted only if their whole prompt fits now and what everyone is expected to grow by (`fits_ahead`),
        so that admission does not lead straight to preemption. They are asked for in groups of doubling size; of a
        group that does not fit, the youngest stay in the queue.
        """
        group = 1
        while self.waiting:
            rows = self.config.max_num_seqs - len(self.running)
            if rows < 1 or budget < 1:  # else what kept it before still holds
                self.waiting[0].waited_for = "rows" if rows < 1 else "budget"
                break
            newcomers = self._newcomers(min(group, rows), budget)
            while newcomers and not self.room.fits_ahead(self.running, chunks, newcomers):
                refused = newcomers.pop()
                refused.sequence.waited_for = "memory"
                self.sharing.want(refused.match)
            if newcomers and self.sharing.catch_up(self.running):
                continue  # they may find more now
            if newcomers:
                chunks, budget = self._start_all(newcomers, chunks, budget)
            if len(newcomers) < group:
                break
            group *= 2
        return chunks

    def run(self, sequence: Sequence, match: Match | None) -> None:
        """Give a sequence that does not wait a row, and whatever of it is cached."""
        row = self.placement.take_row(match)
        sequence.status = Status.RUNNING
        self.running.add(sequence, row, *self.sharing.start(sequence, match))

    def _start(self, sequence: Sequence, match: Match | None) -> None:
        self.waiting.remove(sequence)
        self.run(sequence, match)

    def _start_all(self, newcomers: list[Newcomer], chunks: Int64, budget: int) -> tuple[Int64, int]:
        """They run; everyone's tokens, in order, and what is left of the budget."""
        tokens = dict(zip(self.running, chunks.tolist(), strict=True))
        for new in newcomers:
            self._start(new.sequence, new.match)
        rows = np.array([new.sequence.row for new in newcomers])
        todo = self.running.at.todo(rows, np.zeros(len(rows), np.bool_))
        for new, n in zip(newcomers, todo.tolist(), strict=True):
            tokens[new.sequence] = min(n, new.chunk)
            budget -= tokens[new.sequence]
        return np.array([tokens[sequence] for sequence in self.running], np.int64), budget

    def _newcomers(self, most: int, budget: int) -> list[Newcomer]:
        """The next ones that could start, if there is room for them, under the budget of the step."""
        newcomers: list[Newcomer] = []
        starting: dict[Sequence, int] = {}
        for sequence in self.waiting:
            if len(newcomers) == most or budget < 1:
                break
            if self.sharing.is_coming(sequence, starting):
                sequence.waited_for = "prefix"  # a sibling is about to compute the prompt for it
            elif not sequence.has_pending:
                match = self.sharing.match(sequence)
                past, cuts = self.sharing.outset(sequence, match)
                chunk = min(min(cuts, default=sequence.length) - past, budget)
                priced = Newcomer.of if newcomers else self.room.newcomer
                newcomers.append(priced(sequence, match, chunk))
                starting[sequence] = past
                budget -= chunk
        return newcomers
