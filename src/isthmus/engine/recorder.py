"""Whose pages they are, for the journal: an executor that reads each step, notes who got what, and hands it on."""

from __future__ import annotations

import numpy as np

from isthmus.engine.running import Running
from isthmus.engine.sequence import Sequence
from isthmus.engine.step import Executor, Launched, Step
from isthmus.memory import Journal


class Recorder:
    """Implements `Executor`. An id belongs to the newest request that has it in its block table or as its state.

    What the prefix cache hands on changes its owner with that; what it keeps of a request that ended stays that
    request's.
    """

    def __init__(self, executor: Executor, running: Running, journal: Journal) -> None:
        self._executor = executor
        self._running = running
        self._journal = journal
        self._seen: object = None  # `running.rows` when it was last looked at: another array after every change
        self._who: dict[int, Sequence] = {}  # by row
        self._numbers = np.zeros(0, np.int32)  # in the journal, by row; 0 where nobody runs

    @property
    def overlaps(self) -> bool:
        return self._executor.overlaps

    def launch(self, step: Step) -> Launched:
        if self._running.rows is not self._seen:
            self._look(step)
        writes = step.block_writes
        if len(writes.virtual):
            owners = self._numbers[writes.row]
            named = (owners > 0) & (writes.virtual > 0)
            if named.any():
                self._journal.own("tokens", writes.virtual[named], owners[named])
        return self._executor.launch(step)

    def _look(self, step: Step) -> None:
        """Some run that did not, or run no more."""
        self._seen = self._running.rows
        now = {sequence.row: sequence for sequence in self._running}
        most = max((*now, *step.rows.tolist(), *step.block_writes.row.tolist()), default=0)
        if most >= len(self._numbers):
            self._numbers = np.append(self._numbers, np.zeros(most + 1, np.int32))
        left = [int(self._numbers[row]) for row, sequence in self._who.items() if now.get(row) is not sequence]
        if left:
            self._journal.left(left)
        self._numbers[:] = 0
        for row, sequence in now.items():
            self._numbers[row] = self._journal.name(_name(sequence))
        self._who = now
        if len(step.states):
            owners = self._numbers[step.rows]
            self._journal.own("states", step.states[owners > 0], owners[owners > 0])


def _name(sequence: Sequence) -> str:
    request = sequence.request
    return request.request_id if len(request.sequences) == 1 else f"{request.request_id} #{sequence.index}"
