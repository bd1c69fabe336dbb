"""What a step reads and writes, held against the shadow before anything is launched.

A sequence with n tokens in the step and `past` cached ones reads, of each token group, the cached tokens that its first
query sees, writes n more, and may write them only where it is alone. A state must be its own and stand at `past`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.blocks import ragged
from isthmus.engine.sanitizer.finding import Finding, Place
from isthmus.engine.sanitizer.history import Event
from isthmus.engine.sanitizer.shadow import Pages, Shadow, stays_in
from isthmus.engine.sanitizer.stays import Stay
from isthmus.engine.step import Step

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class _Touches:
    """Pages of one group that a step touches, one entry per sequence and column."""

    which: Int64  # of the step's sequences
    column: Int64
    virtual: Int64
    page: Int64
    start: Int64  # tokens [start, stop) of the page
    stop: Int64


class Claims:
    """One step against the shadow, which has taken in its delta and its block writes."""

    def __init__(self, shadow: Shadow, step: Step) -> None:
        self._shadow = shadow
        self._step = step
        self._rows = step.rows.astype(np.int64)
        self._past = step.past.astype(np.int64)
        self._end = self._past + np.diff(step.query_start)
        self._stays = stays_in(step.rows, shadow.stays)
        self._numbers = shadow.stays.number[step.rows]
        for stay, past in zip(self._stays, self._past.tolist(), strict=True):
            stay.name_to(past // shadow.page_size, shadow.page_size)

    def check(self) -> list[Finding]:
        """One finding at most for each sequence."""
        found: dict[int, Finding] = {}
        for pages in self._shadow.pages.values():
            for s, finding in self._check_states(pages) if pages.group.kind == "state" else self._check_tokens(pages):
                found.setdefault(s, finding)
        return list(found.values())

    def carry_out(self, gone: Bool) -> None:
        """All but these sequences run: what they write is written."""
        shadow = self._shadow
        for pages in shadow.pages.values():
            if pages.group.kind == "state":
                states = self._step.states[~gone]
                places = pages.table[states].astype(np.int64)
                pages.filled[places] = self._end[~gone]
                shadow.ids["states"].content[states] = 0
            else:
                touched = self._written(pages)
                some = ~gone[touched.which] & (touched.page > 0)
                places = touched.page[some]
                pages.filled[places] = touched.stop[some]
            who = self._numbers[~gone] if pages.group.kind == "state" else self._numbers[touched.which[some]]
            pages.history.note_written(places, shadow.step, who, pages.filled[places])
        for stay, end in zip(self._stays, self._end.tolist(), strict=True):
            stay.past = end

    # -- tokens -------------------------------------------------------------------------------------------------

    def _check_tokens(self, pages: Pages) -> Iterator[tuple[int, Finding]]:
        for touched, wrong, verb in (self._wrong_reads(pages), self._wrong_writes(pages)):
            bad = np.flatnonzero(wrong)
            for s in np.unique(touched.which[bad]).tolist():
                mine = bad[touched.which[bad] == s]
                yield s, self._finding(pages, touched, mine, _CODES[int(wrong[mine[0]])], verb)

    def _wrong_reads(self, pages: Pages) -> tuple[_Touches, NDArray[np.uint8], str]:
        size, past = self._shadow.page_size, self._past
        low = self._seen_from(pages, past)
        touched = self._touch(pages, low // size, np.where(low < past, -(-past // size), low // size), past)
        wrong = self._misplaced(pages, touched, np.ones(len(touched.which), np.bool_))
        ids = self._shadow.ids["tokens"]
        some = np.flatnonzero(~self._is_own(touched) & (wrong == 0))
        if len(some):
            own = self._names(touched.which[some], touched.column[some])
            wrong[some[(own == 0) | (ids.content[touched.virtual[some]] != own)]] = _FOREIGN
        wrong[(wrong == 0) & (pages.filled[touched.page] < touched.stop)] = _UNWRITTEN
        return touched, wrong, "reads"

    def _wrong_writes(self, pages: Pages) -> tuple[_Touches, NDArray[np.uint8], str]:
        touched = self._written(pages)
        last = touched.column == (self._end[touched.which] - 1) // self._shadow.page_size
        later = touched.column >= self._seen_from(pages, self._end)[touched.which] // self._shadow.page_size
        wrong = self._misplaced(pages, touched, last | later)
        there = (wrong == 0) & (touched.page > 0)
        wrong[there & ~self._is_own(touched)] = _FOREIGN
        filled = pages.filled[touched.page]
        wrong[there & (wrong == 0) & (filled > touched.start)] = _REWRITTEN
        wrong[there & (wrong == 0) & (filled < touched.start)] = _UNWRITTEN
        return touched, wrong, "writes"

    def _is_own(self, touched: _Touches) -> Bool:
        """Is a page its sequence's, for this column?"""
        ids = self._shadow.ids["tokens"]
        own = (ids.holder[touched.virtual] == self._numbers[touched.which]) & (
            ids.column[touched.virtual] == touched.column
        )
        found: Bool = own
        return found

    def _misplaced(self, pages: Pages, touched: _Touches, needed: Bool) -> NDArray[np.uint8]:
        """Codes of pages that are not where the tables say."""
        wrong = np.zeros(len(touched.which), np.uint8)
        there = touched.page > 0
        wrong[needed & ~there] = _UNBOUND
        wrong[needed & ~there & (pages.was[touched.virtual] > 0)] = _FREED
        wrong[there & ~pages.live[touched.page]] = _FREED
        wrong[there & (wrong == 0) & (pages.named[touched.page] != touched.virtual)] = _STALE
        return wrong

    def _written(self, pages: Pages) -> _Touches:
        size = self._shadow.page_size
        touched = self._touch(pages, self._past // size, -(-self._end // size), self._end)
        start = np.maximum(self._past[touched.which] - touched.column * size, 0)
        return _Touches(touched.which, touched.column, touched.virtual, touched.page, start, touched.stop)

    def _touch(self, pages: Pages, first: Int64, last: Int64, end: Int64) -> _Touches:
        """Columns [first, last) of each sequence, whose tokens end at `end`."""
        size = self._shadow.page_size
        which, column = ragged(first, last)
        self._shadow.widen(int(last.max(initial=0)))
        virtual = self._shadow.blocks[self._rows[which], column].astype(np.int64)
        page = pages.table[virtual].astype(np.int64)
        stop = np.minimum(end[which] - column * size, size)
        return _Touches(which, column, virtual, page, np.zeros_like(stop), stop)

    def _seen_from(self, pages: Pages, position: Int64) -> Int64:
        """The first token that a query at this position sees."""
        window = pages.group.window
        return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)

    def _names(self, which: Int64, column: Int64) -> NDArray[np.uint64]:
        """The names of what these sequences would have written there; 0 where it is not known."""
        counts = np.array([len(stay.names) for stay in self._stays], np.int64)
        names = np.concatenate([np.array([0], np.uint64), *(np.array(s.names, np.uint64) for s in self._stays)])
        first = 1 + np.cumsum(counts) - counts
        found: NDArray[np.uint64] = names[np.where((column >= 0) & (column < counts[which]), first[which] + column, 0)]
        return found

    # -- states -------------------------------------------------------------------------------------------------

    def _check_states(self, pages: Pages) -> Iterator[tuple[int, Finding]]:
        virtual = self._step.states.astype(np.int64)
        page, ids = pages.table[virtual].astype(np.int64), self._shadow.ids["states"]
        every = np.arange(len(virtual))
        touched = _Touches(every, np.zeros_like(every), virtual, page, np.zeros_like(every), self._end)
        wrong = self._misplaced(pages, touched, np.ones(len(virtual), np.bool_))
        wrong[(wrong == 0) & (ids.holder[virtual] != self._numbers)] = _FOREIGN
        goes_on = (wrong == 0) & (self._past > 0)
        own = self._names(every, self._past // self._shadow.page_size - 1)
        content = ids.content[virtual]
        elsewhere = (pages.filled[page] != self._past) | ((content > 0) & (content != own))
        wrong[goes_on & elsewhere] = _STATE
        for s in np.flatnonzero(wrong).tolist():
            yield s, self._finding(pages, touched, np.array([s]), _CODES[int(wrong[s])], "goes on from")

    # -- words --------------------------------------------------------------------------------------------------

    def _finding(self, pages: Pages, touched: _Touches, bad: Int64, kind: str, verb: str) -> Finding:
        """What is wrong with the pages `bad` of one sequence."""
        i, s = int(bad[0]), int(touched.which[bad[0]])
        stay, step = self._stays[s], self._shadow.step
        places = tuple(self._place(pages, touched, int(b)) for b in bad)
        if pages.group.kind == "state":
            doing = f"in step {step} {stay.label} goes on from token {self._past[s]}"
        else:
            first = int(touched.column[i]) * self._shadow.page_size
            doing = f"in step {step} {stay.label} {verb} tokens {first + touched.start[i]} to "
            doing += f"{first + touched.stop[i] - 1} (column {touched.column[i]})"
        kind, what = self._say(pages, kind, places[0], int(touched.page[i]), stay)
        return Finding(kind, f"{doing}, {what}", places, frozenset([stay.number]))

    def _place(self, pages: Pages, touched: _Touches, i: int) -> Place:
        virtual, page = int(touched.virtual[i]), int(touched.page[i])
        return pages.place(page or int(pages.was[virtual]), virtual)

    def _say(self, pages: Pages, kind: str, place: Place, bound: int, stay: Stay) -> tuple[str, str]:
        """The kind, told apart further by what happened to the page, and the rest of the sentence."""
        filled = int(pages.filled[place.page])
        event, other = pages.history.newest(place.page)
        if kind == "freed" and bound and event is Event.MOVED_TO:
            kind, what = "stale", f"where id {place.virtual} has been moved to page {other}"
        elif kind == "freed":
            what = "whose page nobody has" if bound else "whose page was given back"
        elif kind == "unbound":
            what = f"for which id {place.virtual} has no page" if place.virtual else "for which there is no id"
        elif kind == "stale":
            what = f"where page {place.page} is that of id {pages.named[place.page]}, not of id {place.virtual}"
        elif kind == "foreign":
            holder = int(self._shadow.ids[pages.group.space].holder[place.virtual])
            owner = f"{self._shadow.stays.label(holder)} had first" if holder else "no sequence had (a snapshot, say)"
            what = f"on a page that {owner}: it holds another text, or must not be written"
        elif kind == "state":
            own = filled == self._past[self._stays.index(stay)]
            what = f"from a state that has taken in {filled} tokens" + (" of another text" if own else "")
        else:
            what = f"where {filled} tokens of the page are written"
        return kind, what


_UNBOUND, _FREED, _STALE, _FOREIGN, _UNWRITTEN, _REWRITTEN, _STATE = range(1, 8)
_CODES = {
    _UNBOUND: "unbound",
    _FREED: "freed",
    _STALE: "stale",
    _FOREIGN: "foreign",
    _UNWRITTEN: "unwritten",
    _REWRITTEN: "rewritten",
    _STATE: "state",
}
