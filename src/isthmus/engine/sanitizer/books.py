"""The audit: after each step the CPU's own books are compared with each other.

    before a launch   entries that the delta and the block writes touched: in range, v2p and p2v agree
    after a settle    the arena sums to its size; a group that covers its ids has a page for each; and, at most
                      `_AT_ONCE` ids a step on average, live ids = ids of running sequences + cached + fenced ones
    every 256 steps, and when the last request has ended: `Pool.check` and `PrefixCache.check`

Whoever had an id first is noted, so that an id nobody has any more can be named.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.sanitizer.cut import entries
from isthmus.engine.sanitizer.finding import Finding, Place
from isthmus.engine.sanitizer.guard import GuardedPool
from isthmus.engine.sanitizer.stays import Stays
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.step import BlockWrites, Step
from isthmus.memory import Copies, Delta, Frees, Moves, Op, Writes

Ids = NDArray[np.int64]

_AT_ONCE = 1 << 14  # ids
_WHOLE = 256  # steps between checks of everything


class Books:
    """Of one scheduler and its pool."""

    def __init__(self, scheduler: Scheduler, pool: GuardedPool, stays: Stays) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._stays = stays
        self.had = {space: np.zeros(ids.capacity + 1, np.int64) for space, ids in pool.spaces.items()}
        """The stay that had each id last."""
        self._due = 0  # the step from which ids are counted again
        self._whole = _WHOLE  # the step from which everything is
        self._idle = True  # nobody was served, and everything was checked

    # -- before a launch --------------------------------------------------------------------------------------

    def note(self, step: Step) -> None:
        """Who has which ids from this step on."""
        writes = step.block_writes
        kept = writes.virtual > 0
        if kept.any():
            self._note("tokens", writes.virtual[kept], self._stays.number[writes.row[kept]])
        if len(step.states):
            self._note("states", step.states, self._stays.number[step.rows])

    def in_range(self, delta: Delta, writes: BlockWrites) -> tuple[Delta, BlockWrites, list[Finding]]:
        """The same without entries that name what does not exist, and a finding for each of those."""
        found: list[Finding] = []
        ops: list[Op] = []
        for op in delta.ops:
            assert isinstance(op, Moves | Copies | Writes | Frees)
            wrong = self._out_of_range(op)
            if wrong.any():
                found += [self._strange_entry(op, int(i)) for i in np.flatnonzero(wrong)]
            ops.append(entries(op, ~wrong) if wrong.any() else op)
        most = self._pool.ids("tokens").capacity if "tokens" in self._pool.spaces else 0
        wrong = (writes.virtual < 0) | (writes.virtual > most) | (writes.column < 0)
        for i in np.flatnonzero(wrong).tolist():
            row, column, virtual = int(writes.row[i]), int(writes.column[i]), int(writes.virtual[i])
            number = int(self._stays.number[row])
            where = f"row {row}, column {column} of {self._stays.label(number)}"
            what = f"the block table would get id {virtual} in {where}: ids are 1 to {most}"
            places = tuple(self._true_places(row, column))
            found.append(Finding("range", what, places, frozenset([number] if number else [])))
        if not found:
            return delta, writes, found
        kept = ~wrong
        return Delta(ops), BlockWrites(writes.row[kept], writes.column[kept], writes.virtual[kept]), found

    def touched(self, delta: Delta) -> Iterator[Finding]:
        """Table entries that a delta has written, or whose pages it moved or freed: does the pool agree with itself?"""
        for op in delta.ops:
            assert isinstance(op, Moves | Copies | Writes | Frees)
            region, table = self._pool.regions[op.group], self._pool.tables[op.group].entries
            if isinstance(op, Writes):
                virtual = op.virtual.astype(np.int64)
                page = table[virtual]
                bad = (page > 0) & (region.owner[page] != virtual)
            else:
                page = op.page if isinstance(op, Frees) else op.source
                virtual = region.owner[page].astype(np.int64)
                bad = (virtual > 0) & (table[virtual] != page)
            for i in np.flatnonzero(bad).tolist():
                what = f"id {virtual[i]} has page {table[virtual[i]]}, page {page[i]} is that of id "
                what += f"{region.owner[page[i]]}"
                users = self.users(self._pool.groups[op.group].space, [int(virtual[i])])
                yield Finding("books", what, (Place(op.group, int(page[i]), int(virtual[i])),), users)

    # -- after a settle ---------------------------------------------------------------------------------------

    def balance(self) -> Iterator[Finding]:
        """Does everything add up?"""
        yield from self._sums()
        steps, idle = self._scheduler.counters.steps, not self._scheduler.requests
        live = sum(ids.live for ids in self._pool.spaces.values())
        if steps >= self._due or idle != self._idle:
            self._due = steps + max(1, live // _AT_ONCE)
            for space in self._pool.spaces:
                yield from self._owners(space)
        if steps >= self._whole or (idle and not self._idle):
            self._whole = steps + _WHOLE
            yield from self._everything()
        self._idle = idle

    def users(self, space: str, virtual: list[int]) -> frozenset[int]:
        """Stays whose row or state names one of these ids, by the placement's tables."""
        found = set()
        for number, stay in self._stays.served.items():
            if np.isin(self.row(space, stay.row), virtual).any():
                found.add(number)
        return frozenset(found)

    def row(self, space: str, row: int) -> Ids:
        """The ids that a row has, by the placement's tables."""
        return self._rows(space, np.array([row], np.int64))

    # -- inside -----------------------------------------------------------------------------------------------

    def _note(self, space: str, virtual: NDArray[np.int32], who: Ids) -> None:
        """These have these ids now; an id that another one who runs has had before stays that one's."""
        had = self.had[space]
        free = ~np.isin(had[virtual], self._stays.number[self._stays.number > 0])
        had[virtual[free]] = who[free]

    def _sums(self) -> Iterator[Finding]:
        pool = self._pool
        try:
            pool.usage(self._scheduler.placement.idle).check()
        except AssertionError as error:
            yield Finding("books", str(error))
        for space, names in pool.covering.items():
            for name in names:
                if pool.regions[name].live != pool.ids(space).live:
                    what = f"group {name} has {pool.regions[name].live} pages for {pool.ids(space).live} live ids"
                    yield Finding("books", what)
        for name, region in pool.regions.items():
            if region.live > pool.ids(pool.groups[name].space).live:
                yield Finding("books", f"group {name} has {region.live} pages, more than there are live ids")

    def _owners(self, space: str) -> Iterator[Finding]:
        """Ids that nobody has, that several have, and dead ones that somebody has."""
        known = self._pool.ids(space)
        rows = self._scheduler.running.rows
        own = self._rows(space, rows)
        own = own[own <= known.capacity]
        mark = self._pool.fenced[space].copy()
        cache = self._scheduler.cache
        if cache is not None:
            mark[cache.ids(space)] = True
        private = own[~mark[own]]
        mark[private] = True
        dead = private[~known.is_live(private)]
        for virtual in np.unique(dead).tolist():
            users = self.users(space, [virtual])
            yield Finding("freed", f"id {virtual} is in use and not live", self._places(space, virtual), users)
        ids, counts = np.unique(private, return_counts=True) if len(private) else (private, private)
        for virtual in ids[counts > 1].tolist():
            users = self.users(space, [virtual])
            yield Finding("double", f"id {virtual} is in several places", self._places(space, virtual), users)
        if int(np.count_nonzero(mark)) != known.live or len(dead):
            live = np.asarray(known.live_ids())
            for virtual in live[~mark[live]].tolist():
                who = self._stays.label(int(self.had[space][virtual]))
                what = f"id {virtual} of {space} is live, and nobody has it; {who} had it last"
                yield Finding("leak", what, self._places(space, virtual))

    def _everything(self) -> Iterator[Finding]:
        try:
            self._pool.check()
            if self._scheduler.cache is not None:
                self._scheduler.cache.check()
        except AssertionError as error:
            yield Finding("books", str(error))

    def _rows(self, space: str, rows: Ids) -> Ids:
        """Ids in these rows, as they come."""
        placement = self._scheduler.placement
        if space == "states":
            states = placement.states(rows)
            return states[states > 0].astype(np.int64)
        columns = placement.blocks.columns[rows]
        column = np.arange(int(columns.max(initial=0)))
        ids = placement.blocks.ids(rows[:, None], column[None])
        return ids[(column < columns[:, None]) & (ids > 0)].astype(np.int64)

    def _places(self, space: str, virtual: int) -> tuple[Place, ...]:
        """Where an id has pages."""
        tables = ((name, self._pool.tables[name].entries) for name, g in self._pool.groups.items() if g.space == space)
        found = tuple(Place(name, int(table[virtual]), virtual) for name, table in tables if table[virtual])
        return found or tuple(Place(name, 0, virtual) for name in self._pool.covering[space][:1])

    def _true_places(self, row: int, column: int) -> tuple[Place, ...]:
        """Where the page of a column is, by the placement's own table; none if it names none."""
        if column < 0:
            return ()
        blocks = self._scheduler.placement.blocks
        if column >= blocks.columns[row]:
            return ()
        virtual = int(blocks.ids(np.array([row]), np.array([column]))[0])
        known = self._pool.ids("tokens")
        inside = 0 < virtual <= known.capacity and bool(known.is_live([virtual])[0])
        return self._places("tokens", virtual) if inside else ()

    def _out_of_range(self, op: Op) -> NDArray[np.bool_]:
        pages = self._pool.num_pages(op.group)
        if isinstance(op, Writes):
            most = len(self._pool.tables[op.group])
            wrong = (op.virtual < 1) | (op.virtual >= most) | (op.physical < 0) | (op.physical >= pages)
        elif isinstance(op, Frees):
            wrong = (op.page < 1) | (op.page >= pages)
        else:
            wrong = (op.source < 1) | (op.source >= pages) | (op.destination < 1) | (op.destination >= pages)
        found: NDArray[np.bool_] = wrong
        return found

    def _strange_entry(self, op: Op, i: int) -> Finding:
        """An entry of a delta that names what does not exist; if it is a table write, its id's users cannot go on."""
        space, pages = self._pool.groups[op.group].space, self._pool.num_pages(op.group)
        if not isinstance(op, Writes):
            page = int(op.page[i] if isinstance(op, Frees) else op.source[i])
            what = f"the delta names page {page} or its place: pages of {op.group} are 1 to {pages - 1}"
            return Finding("range", what, (Place(op.group, page),))
        virtual, page = int(op.virtual[i]), int(op.physical[i])
        most = self._pool.ids(space).capacity
        what = f"the delta binds id {virtual} to page {page}: ids are 1 to {most}, pages of {op.group} below {pages}"
        inside = 0 < virtual <= most
        users = self.users(space, [virtual]) if inside else frozenset[int]()
        places = self._places(space, virtual) if inside else (Place(op.group, 0, virtual),)
        return Finding("range", what, places, users)
