"""Who runs, by row, and what those who did were called."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.running import Running
from isthmus.engine.sequence import Sequence

Int64 = NDArray[np.int64]

_REMEMBERED = 1 << 16  # names of stays that are over


@dataclass(slots=True)
class Stay:
    """One sequence's time in one row: a sequence that was preempted comes back as another stay."""

    number: int  # as in `Rows.owner`
    row: int
    sequence: Sequence
    past: int = 0  # tokens cached once all that was launched has run
    recorded: int = 0  # columns whose content the shadow has noted
    names: list[int] = field(default_factory=list)  # of its full pages: of their tokens and all before them

    @property
    def label(self) -> str:
        """For people."""
        request = self.sequence.request
        which = f" (continuation {self.sequence.index})" if len(request.sequences) > 1 else ""
        return f"{request.request_id!r}{which}"

    def name_to(self, columns: int, page_size: int) -> None:
        """Name pages up to a column, as far as their tokens are known."""
        have, last = len(self.names), min(columns, self.sequence.known // page_size)
        if last <= have:
            return
        if not have:
            salt = self.sequence.request.cache_salt
            digest = blake2b(repr(salt).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        else:
            digest = self.names[-1].to_bytes(8, "little")
        tokens = np.array(self.sequence.tokens(have * page_size, last * page_size), np.int32).tobytes()
        size = 4 * page_size
        for start in range(0, len(tokens), size):
            digest = blake2b(digest + tokens[start : start + size], digest_size=8).digest()
            self.names.append(int.from_bytes(digest, "little"))


class Stays:
    """Of those that ran when the newest step was planned."""

    def __init__(self, running: Running, num_rows: int) -> None:
        self._now = running
        self.running: dict[int, Stay] = {}  # by number
        self.leaving: dict[int, Stay] = {}  # those that ended before the newest step, for whose last delta it brings
        self.number = np.zeros(num_rows, np.int64)  # of the stay in each row, 0 for nobody
        self._over: OrderedDict[int, str] = OrderedDict()  # what earlier ones were called

    @property
    def served(self) -> dict[int, Stay]:
        """Those of them that run still."""
        owner = self._now.at.owner
        return {number: stay for number, stay in self.running.items() if owner[stay.row] == number}

    def update(self) -> None:
        """A step was planned."""
        running, rows = self._now, self._now.rows
        now = np.zeros_like(self.number)
        now[rows] = running.at.owner[rows]
        self.leaving = {}
        if np.array_equal(now, self.number):
            return
        numbers = set(now[rows].tolist())
        self.leaving = {number: self.running.pop(number) for number in list(self.running) if number not in numbers}
        for number, stay in self.leaving.items():
            self._over[number] = stay.label
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        for sequence, number in zip(running, now[rows].tolist(), strict=True):
            if number not in self.running:
                self.running[number] = Stay(number, sequence.row, sequence)
        self.number = now

    def label(self, number: int) -> str:
        """What a stay is or was called."""
        stay = self.running.get(number)
        return stay.label if stay is not None else self._over.get(number, "an earlier request" if number else "nobody")
