"""The last ten things that happened to each page of a group, as columns of numbers."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

KEPT = 10

Pages = NDArray[np.integer]
_EVENT = np.dtype([("kind", "u1"), ("first", "i4"), ("last", "i4"), ("who", "i8"), ("other", "i4")])


class Event(enum.IntEnum):
    """What happened; `who` is a stay, or 0; `other` as said beside it."""

    GRANTED = 1  # id
    WRITTEN = 2  # tokens in the page after it
    MOVED_TO = 3  # page
    MOVED_FROM = 4  # page
    COPIED_TO = 5  # page
    COPIED_FROM = 6  # page
    SHARED = 7  # id
    RENAMED = 8  # id
    FREED = 9  # id


class History:
    """Of one group's pages. Memory is taken as pages are used."""

    def __init__(self, pages: int) -> None:
        self._ring = np.zeros((pages, KEPT), _EVENT)
        self._count = np.zeros(pages, np.int32)  # events so far

    def note(self, kind: Event, pages: Pages, step: int, who: Pages | int = 0, other: Pages | int = 0) -> None:
        """One event on each of these pages, all different."""
        if not len(pages):
            return
        entries = np.zeros(len(pages), _EVENT)
        entries["kind"], entries["first"], entries["last"] = kind, step, step
        entries["who"], entries["other"] = who, other
        self._ring[pages, self._count[pages] % KEPT] = entries
        self._count[pages] += 1

    def note_written(self, pages: Pages, step: int, who: Pages, filled: Pages) -> None:
        """Sequences put tokens into these pages, one after the other: of one sequence it is one event that goes on."""
        newest = (pages, (self._count[pages] - 1) % KEPT)
        last = self._ring[newest]
        goes_on = (last["kind"] == Event.WRITTEN) & (last["who"] == who) & (self._count[pages] > 0)
        on = (pages[goes_on], newest[1][goes_on])
        self._ring["last"][on] = step
        self._ring["other"][on] = filled[goes_on]
        new = ~goes_on
        self.note(Event.WRITTEN, pages[new], step, who[new], filled[new])

    def credit(self, pages: Pages, who: Pages | int) -> None:
        """The grants that these pages' last events are were for these sequences."""
        newest = (pages, (self._count[pages] - 1) % KEPT)
        self._ring["who"][newest] = np.where(
            self._ring["kind"][newest] == Event.GRANTED, who, self._ring["who"][newest]
        )

    def newest(self, page: int) -> tuple[Event | None, int]:
        """The last event's kind and `other`."""
        if not self._count[page]:
            return None, 0
        entry = self._ring[page, (self._count[page] - 1) % KEPT]
        return Event(int(entry["kind"])), int(entry["other"])

    def of(self, page: int, label: Callable[[int], str]) -> list[str]:
        """The page's last events, oldest first, in words; `label` names a stay."""
        count = int(self._count[page])
        kept = [self._ring[page, i % KEPT] for i in range(max(0, count - KEPT), count)]
        return [_words(entry, label) for entry in kept]


def _words(entry: np.void, label: Callable[[int], str]) -> str:
    first, last, who, other = (int(entry[name]) for name in ("first", "last", "who", "other"))
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    text = {
        Event.GRANTED: f"granted to id {other}" + (f" of {label(who)}" if who else ""),
        Event.WRITTEN: f"written by {label(who)}, up to {other} tokens",
        Event.MOVED_TO: f"moved to page {other}",
        Event.MOVED_FROM: f"moved here from page {other}",
        Event.COPIED_TO: f"copied to page {other}",
        Event.COPIED_FROM: f"filled with a copy of page {other}",
        Event.SHARED: f"shared with {label(who)} as id {other}",
        Event.RENAMED: f"handed over to id {other}",
        Event.FREED: f"freed by id {other}",
    }[Event(int(entry["kind"]))]
    return f"{steps}: {text}"
