"""Who owns every page and what it holds, worked out from deltas, block writes and who runs: a second opinion.

It asks neither pool nor placement nor prefix cache. Per group and physical page:

    live[p]     somebody has it: from the grant (or a move onto it) to its release (or the move away)
    named[p]    the id it was bound to last
    filled[p]   how many of its tokens are written; of a state page, how many tokens the state has taken in

and per id of a space, since it was minted:

    holder[v]   the stay that had it first, which alone may write there; 0: nobody has it yet
    column[v]   the column it has there
    content[v]  name of the tokens the page holds and of all before them; 0: not known, or not a full page

A page is written once, token after token. Others than its holder may read a page whose content is, by name, what they
would have written themselves: that is all the prefix cache may share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.blocks import ragged
from isthmus.engine.sanitizer.finding import Finding, Place
from isthmus.engine.sanitizer.history import Event, History
from isthmus.engine.sanitizer.stays import Stay, Stays
from isthmus.engine.step import BlockWrites
from isthmus.memory import Copies, Delta, Frees, Group, Moves, Pool, Writes

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class Pages:
    """One group."""

    def __init__(self, group: Group, num_pages: int, num_ids: int, *, covers: bool) -> None:
        self.group = group
        self.covers = covers  # its pages are bound from an id's first moment to its last
        self.table = np.zeros(num_ids + 1, np.int32)  # virtual -> physical as the device was told, 0 = not bound
        self.was = np.zeros(num_ids + 1, np.int32)  # the last place each id had
        self.live = np.zeros(num_pages, np.bool_)
        self.named = np.zeros(num_pages, np.int32)
        self.filled = np.zeros(num_pages, np.int32)
        self.history = History(num_pages)

    def place(self, page: int, virtual: int = 0) -> Place:
        """For a report."""
        return Place(self.group.name, page, virtual)


class Ids:
    """One id space."""

    def __init__(self, capacity: int) -> None:
        self.holder = np.zeros(capacity + 1, np.int64)
        self.column = np.zeros(capacity + 1, np.int32)
        self.content = np.zeros(capacity + 1, np.uint64)
        self.born = np.zeros(capacity + 1, np.int64)  # the step whose delta bound it first


class Shadow:
    """Of one pool, from before its first delta.

    Args:
        pool: read here for its sizes, never again.
        stays: who runs.
        page_size: tokens of a column.
    """

    def __init__(self, pool: Pool, stays: Stays, page_size: int) -> None:
        self.stays = stays
        self.page_size = page_size
        self.pages: dict[str, Pages] = {}
        for name, group in pool.groups.items():
            covers = name == pool.covering[group.space][0]
            capacity = pool.ids(group.space).capacity
            self.pages[name] = Pages(group, pool.num_pages(name), capacity, covers=covers)
        self.ids = {space: Ids(ids.capacity) for space, ids in pool.spaces.items()}
        self.blocks = np.zeros((len(stays.number), 64), np.int32)
        self.states = np.zeros(len(stays.number), np.int32)  # id of each row's state
        self.step = 0  # the newest one seen

    # -- what is told ---------------------------------------------------------------------------------------

    def apply(self, delta: Delta, pins: Mapping[str, Iterable[int]], step: int) -> list[Finding]:
        """A delta is handed out with a step. `pins`: pages that must not move, per group."""
        self.step = step
        self._note_contents()
        found: list[Finding] = []
        for op in delta.ops:
            pages = self.pages[op.group]
            if isinstance(op, Writes):
                found += self._write(pages, op.virtual, op.physical)
            elif isinstance(op, Frees):
                self._free(pages, op.page)
            elif isinstance(op, Moves):
                found += self._move(pages, op, pins.get(op.group, ()))
            elif isinstance(op, Copies):
                found += self._copy(pages, op)
        return found

    def write_blocks(self, writes: BlockWrites, columns: Int64) -> None:
        """Block tables change; fresh ids get their holder, and pages that somebody computed go to others too.

        columns: [rows], how many of each row's are used in this step.
        """
        if not len(writes.row):
            return
        self.widen(int(writes.column.max()) + 1)
        self.blocks[writes.row, writes.column] = writes.virtual
        new = (self.blocks[writes.row, writes.column] == writes.virtual) & (writes.virtual > 0)
        new &= writes.column < columns[writes.row]
        row, column, virtual = writes.row[new], writes.column[new], writes.virtual[new]
        ids, who = self.ids["tokens"], self.stays.number[row]
        fresh = (ids.holder[virtual] == 0) & (ids.born[virtual] == self.step) & (who > 0)
        ids.holder[virtual[fresh]], ids.column[virtual[fresh]] = who[fresh], column[fresh]
        shared = (who > 0) & (ids.holder[virtual] != who)
        for pages in self._of("tokens"):
            self._credit(pages, virtual[fresh], who[fresh])
            self._share(pages, virtual[shared], who[shared])

    def write_states(self, rows: Int32, states: Int32) -> None:
        """These rows go on in these states."""
        if not len(states):
            return
        self.states[rows] = states
        ids, who = self.ids["states"], self.stays.number[rows]
        fresh = (ids.holder[states] == 0) & (ids.born[states] == self.step)
        ids.holder[states[fresh]] = who[fresh]
        for pages in self._of("states"):
            self._credit(pages, states[fresh], who[fresh])

    def widen(self, columns: int) -> None:
        """Make room for so many columns in the block tables."""
        have = self.blocks.shape[1]
        if columns > have:
            more = np.zeros((len(self.blocks), max(columns, 2 * have) - have), np.int32)
            self.blocks = np.concatenate((self.blocks, more), axis=1)

    # -- what is asked --------------------------------------------------------------------------------------

    def users(self, space: str, virtual: Iterable[int]) -> frozenset[int]:
        """Stays that may read or write one of these ids."""
        ids = np.array([v for v in virtual if v > 0], np.int64)
        if not len(ids):
            return frozenset()
        if space == "states":
            return frozenset(n for n, stay in self.stays.served.items() if self.states[stay.row] in ids)
        found = set()
        for number, stay in self.stays.served.items():
            columns = -(-stay.past // self.page_size)
            if np.isin(self.blocks[stay.row, :columns], ids).any():
                found.add(number)
        return frozenset(found)

    def under(self, group: str, page: int) -> list[Place]:
        """Live pages of any group, this one included, that share a byte with this page."""
        size = self.pages[group].group.spec.page_bytes
        found = []
        for pages in self.pages.values():
            other = pages.group.spec.page_bytes
            lo, hi = page * size // other, -(-(page + 1) * size // other)
            live = np.flatnonzero(pages.live[lo:hi]) + lo
            found += [pages.place(int(p), int(pages.named[p])) for p in live]
        return found

    def history(self, place: Place) -> list[str]:
        """What happened to a page, oldest first."""
        return self.pages[place.group].history.of(place.page, self.stays.label) if place.page else []

    def last_holder(self, place: Place) -> int:
        """The stay that had the page's id, or has it."""
        pages = self.pages[place.group]
        virtual = place.virtual or int(pages.named[place.page])
        return int(self.ids[pages.group.space].holder[virtual])

    # -- inside ---------------------------------------------------------------------------------------------

    def _of(self, space: str) -> list[Pages]:
        return [pages for pages in self.pages.values() if pages.group.space == space]

    def _credit(self, pages: Pages, virtual: Int32, who: Int64) -> None:
        places = pages.table[virtual]
        pages.history.credit(places[places > 0], who[places > 0])

    def _share(self, pages: Pages, virtual: Int32, who: Int64) -> None:
        there = np.flatnonzero(pages.table[virtual])
        while len(there):  # a page may go to several at once
            first = np.unique(virtual[there], return_index=True)[1]
            some = there[first]
            pages.history.note(Event.SHARED, pages.table[virtual[some]], self.step, who[some], virtual[some])
            there = np.delete(there, first)

    def _note_contents(self) -> None:
        """Name what sequences have put into full pages, as far as their tokens are known by now."""
        if "tokens" not in self.ids:
            return
        ids, size = self.ids["tokens"], self.page_size
        for stay in (*self.stays.leaving.values(), *self.stays.running.values()):
            full = min(stay.past, stay.sequence.known) // size
            if full <= stay.recorded:
                continue
            stay.name_to(full, size)
            virtual = self.blocks[stay.row, stay.recorded : full]
            own = (virtual > 0) & (ids.holder[virtual] == stay.number)
            ids.content[virtual[own]] = np.array(stay.names[stay.recorded : full], np.uint64)[own]
            stay.recorded = full

    def _write(self, pages: Pages, virtual: Int32, physical: Int32) -> list[Finding]:
        bound = physical > 0
        pages.table[virtual[~bound]] = 0
        v, p = virtual[bound], physical[bound]
        if not len(v):
            return []
        other, first = pages.named[p], np.unique(p, return_index=True)[1]
        claimed = pages.live[p] & (other != v) & (pages.table[other] == p)
        found = [self._two_owners(pages, int(other[i]), int(v[i]), int(p[i])) for i in np.flatnonzero(claimed)]
        for i in np.setdiff1d(np.arange(len(p)), first).tolist():  # twice in one operation
            found.append(self._two_owners(pages, int(v[first][p[first] == p[i]][0]), int(v[i]), int(p[i])))
        before = pages.table[v]
        strayed = (before > 0) & (before != p) & pages.live[before] & (pages.named[before] == v)
        found += [self._two_places(pages, int(v[i]), int(p[i])) for i in np.flatnonzero(strayed)]
        pages.live[before[strayed]] = False  # whatever is there, the id has left it
        renamed = pages.live[p] & (other != v) & ~claimed
        pages.history.note(Event.RENAMED, p[renamed], self.step, 0, v[renamed])
        fresh = ~pages.live[p]
        found += self._overlaps(pages, v[fresh], p[fresh])
        if pages.covers:
            born = v[pages.table[v] == 0]
            ids = self.ids[pages.group.space]
            ids.holder[born], ids.content[born], ids.born[born] = 0, 0, self.step
        pages.table[v], pages.was[v] = p, p
        pages.named[p[~claimed]] = v[~claimed]
        pages.filled[p[fresh]] = 0
        pages.live[p] = True
        pages.history.note(Event.GRANTED, p[fresh], self.step, 0, v[fresh])
        return found

    def _two_owners(self, pages: Pages, first: int, virtual: int, page: int) -> Finding:
        return Finding(
            "double",
            f"the delta of step {self.step} binds page {page} to id {virtual} while id {first} has it",
            (pages.place(page, first), pages.place(page, virtual)),
            harmed=True,
        )

    def _two_places(self, pages: Pages, virtual: int, page: int) -> Finding:
        before = int(pages.table[virtual])
        what = f"the delta of step {self.step} binds id {virtual} to page {page} while it has page {before}, which was "
        return Finding(
            "double",
            what + "not moved there",
            (pages.place(before, virtual), pages.place(page, virtual)),
            harmed=True,
        )

    def _overlaps(self, pages: Pages, virtual: Int32, physical: Int32) -> list[Finding]:
        """Fresh pages on bytes that are another group's."""
        size, found = pages.group.spec.page_bytes, []
        place = physical.astype(np.int64)
        for other in self.pages.values():
            if other is pages:
                continue
            theirs = other.group.spec.page_bytes
            end = np.minimum(-(-(place + 1) * size // theirs), len(other.live))  # the last one may not be whole
            which, under = ragged(place * size // theirs, end)
            for i in np.flatnonzero(other.live[under]).tolist():
                mine, yours = int(which[i]), int(under[i])
                what = f"page {physical[mine]} of {pages.group.name} is put on the bytes of page {yours} of "
                what += f"{other.group.name}, which id {other.named[yours]} has"
                where = (
                    pages.place(int(physical[mine]), int(virtual[mine])),
                    other.place(yours, int(other.named[yours])),
                )
                found.append(Finding("double", what, where, harmed=True))
        return found

    def _free(self, pages: Pages, page: Int32) -> None:
        pages.live[page] = False
        pages.history.note(Event.FREED, page, self.step, 0, pages.named[page])

    def _move(self, pages: Pages, op: Moves, pins: Iterable[int]) -> list[Finding]:
        source, destination, found = op.source, op.destination, []
        pinned = np.isin(source, np.fromiter(pins, np.int64))
        for what, wrong in (
            ("which is pinned", pinned),
            ("which nobody has", ~pages.live[source]),
            ("onto a page that is in use", pages.live[destination]),
        ):
            for i in np.flatnonzero(wrong).tolist():
                text = f"the delta of step {self.step} moves page {source[i]}, {what}, to page {destination[i]}"
                places = [pages.place(int(source[i]), int(pages.named[source[i]]))]
                if pages.live[destination[i]]:
                    places.insert(0, pages.place(int(destination[i]), int(pages.named[destination[i]])))
                found.append(Finding("moved", text, tuple(places), harmed=True))
        named, filled = pages.named[source], pages.filled[source]
        found += self._overlaps(pages, named, destination)
        pages.live[source] = False
        pages.live[destination], pages.named[destination], pages.filled[destination] = True, named, filled
        pages.history.note(Event.MOVED_TO, source, self.step, 0, destination)
        pages.history.note(Event.MOVED_FROM, destination, self.step, 0, source)
        return found

    def _copy(self, pages: Pages, op: Copies) -> list[Finding]:
        ids, found = self.ids[pages.group.space], []
        for source, destination in zip(op.source.tolist(), op.destination.tolist(), strict=True):
            if not (pages.live[source] and pages.live[destination]):
                text = f"the delta of step {self.step} copies page {source} to page {destination}, and one is nobody's"
                where = (pages.place(destination, int(pages.named[destination])),)
                found.append(Finding("moved", text, where, harmed=True))
            mine, theirs = int(pages.named[source]), int(pages.named[destination])
            if pages.group.kind == "state":
                ids.content[theirs] = self._content(mine, int(pages.filled[source]))
            else:
                ids.content[theirs] = ids.content[mine]
        pages.filled[op.destination] = pages.filled[op.source]
        pages.history.note(Event.COPIED_TO, op.source, self.step, 0, op.destination)
        pages.history.note(Event.COPIED_FROM, op.destination, self.step, 0, op.source)
        return found

    def _content(self, state: int, taken: int) -> int:
        """The name of the tokens that a state has taken in."""
        ids = self.ids["states"]
        if ids.content[state]:
            return int(ids.content[state])
        holder = int(ids.holder[state])
        stay = self.stays.running.get(holder) or self.stays.leaving.get(holder)
        if stay is None or taken % self.page_size or not taken:
            return 0
        columns = taken // self.page_size
        stay.name_to(columns, self.page_size)
        return stay.names[columns - 1] if columns <= len(stay.names) else 0


def stays_in(rows: Int32, stays: Stays) -> Sequence[Stay]:
    """Who has these rows."""
    return [stays.running[number] for number in stays.number[rows].tolist()]
