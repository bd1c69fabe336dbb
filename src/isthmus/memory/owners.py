"""Who the pages belong to, as far as somebody said so: names of owners by virtual id.

The pool does not know and does not care. The journal writes it down for whoever looks at a replay: `name` interns an
owner, `own` gives it ids, `left` says that it runs no more (what it computed may live on in a prefix cache).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.records import IntLike

LONGEST = 80
"""Characters of a name; more are cut off."""


class Owners:
    """Owner of each id of each space, by number; 0 is nobody known."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self.of = {space: np.zeros(n + 1, np.int32) for space, n in capacities.items()}
        self.names: dict[int, str] = {}
        self.gone: set[int] = set()  # numbers of those that run no more
        self._numbers: dict[str, int] = {}
        self._next = 1

    def number(self, name: str) -> tuple[int, bool]:
        """The number of a name, and whether it is new."""
        name = name[:LONGEST]
        number = self._numbers.get(name)
        if number is not None:
            return number, False
        self.put(self._next, name)
        return self._next - 1, True

    def put(self, number: int, name: str) -> None:
        """It has this number."""
        self.names[number] = name
        self._numbers[name] = number
        self.gone.discard(number)
        self._next = max(self._next, number + 1)

    def own(self, space: str, ids: IntLike, numbers: IntLike | int) -> None:
        """They own these ids now; 0 for nobody known."""
        self.of[space][np.asarray(ids, np.int64)] = numbers

    def copied(self, space: str, source: IntLike, destination: IntLike) -> None:
        """A copy belongs to the owner of its source, until somebody says otherwise."""
        of = self.of[space]
        of[np.asarray(destination, np.int64)] = of[np.asarray(source, np.int64)]

    def left(self, numbers: IntLike) -> None:
        """They run no more."""
        self.gone.update(np.asarray(numbers).tolist())

    def name_of(self, space: str, page_id: int) -> str:
        """In words."""
        number = int(self.of[space][page_id]) if 0 <= page_id < len(self.of[space]) else 0
        if number not in self.names:
            return "an unknown owner"
        return f"request {self.names[number]}" + (" (runs no more)" if number in self.gone else "")

    def keep_only(self, live: Mapping[str, NDArray[np.integer]]) -> None:
        """Forget owners of ids that are not live, and names that nobody running or living goes by."""
        kept: set[int] = set()
        for space, ids in live.items():
            of = np.zeros_like(self.of[space])
            of[ids] = self.of[space][ids]
            self.of[space] = of
            kept.update(np.unique(of[ids]).tolist())
        for number in [n for n in self.names if n in self.gone and n not in kept]:
            self._numbers.pop(self.names.pop(number))
            self.gone.discard(number)
