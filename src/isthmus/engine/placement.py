"""Where the running sequences' pages are: rows, block tables and states, and what each step binds and gives back.

row r:  columns [0, blocks.columns[r]) have ids where some group has a page
        columns [0, passed[g][r]) of window group g are not this row's to read or give back any more
        columns [0, found[r]) the prefix cache had first; others may use them too
        columns [0, known[r]) are the prefix cache's, if there is one, and locked for this row; the rest are its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.cache import CacheKind, kind_of
from isthmus.cache.names import Names
from isthmus.cache.prefix import Match, PrefixCache
from isthmus.engine.blocks import BlockTables, ragged
from isthmus.memory import Plan, Pool

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """What rows gain by going on, of those that gain a page of any kind: few of those that decode do."""

    rows: Int64
    columns: tuple[Int64, Int64]  # [low, high) that get their place in the block table
    bound: Mapping[str, tuple[Int64, Int64]]  # per group, those that get a page; empty if there are no rows
    demand: Mapping[str, int]  # pages per group


@dataclass(frozen=True)
class Held:
    """What sequences have, as far as prices ask: arrays with one entry each."""

    past: Int64  # tokens cached
    columns: Int64  # of the block table that have ids
    found: Int64  # of these, those that the prefix cache had first
    begun: NDArray[np.bool_]  # has it a state page?


class Placement:
    """The one place where a scheduler's lengths become pages of the pool. Arrays have one entry per sequence."""

    def __init__(self, pool: Pool, num_rows: int, cache: PrefixCache | None = None) -> None:
        self.blocks = BlockTables(num_rows)
        self.cache = cache
        self._pool = pool
        self._kinds: dict[str, CacheKind] = {
            name: kind_of(group, keep_boundary=cache is not None) for name, group in pool.groups.items()
        }
        self._tokens = [name for name, kind in self._kinds.items() if kind.space == "tokens"]
        covering = pool.covering.get("tokens", ())
        self._cover = covering[0] if covering else ""  # binds every live id
        self._some = [name for name in self._tokens if name not in covering]  # those that do not
        windows = [name for name in self._tokens if pool.groups[name].kind == "window"]
        # A window that covers the ids comes last: its ids die, where others only unbind.
        windows.sort(key=lambda name: name == self._cover)
        self._passed = {name: np.zeros(num_rows, np.int64) for name in windows}
        self._known = np.zeros(num_rows, np.int64)
        self._found = np.zeros(num_rows, np.int64)
        self._states = np.zeros(num_rows, np.int32)  # id of each row's state page, 0 before the first step
        self._taken = {name: np.zeros(num_rows, np.int64) for name in pool.groups}  # fresh pages since the row started
        self._to_save: dict[bytes, tuple[int, int, Names]] = {}  # name of a boundary -> a row that is there
        self._restore: dict[int, int] = {}  # row -> locked snapshot that its state page is to be copied from
        self._locked: tuple[Int64, Int64] | None = None  # rows with locks on what windows have passed, and their past
        none = np.zeros(0, np.int64)
        self._nothing = Growth(none, (none, none), {}, dict.fromkeys(self._kinds, 0))

    @property
    def idle(self) -> Mapping[str, int]:
        """Pages per group that the prefix cache could give back."""
        return {} if self.cache is None else {name: n for name, n in self.cache.idle.items() if n}

    def demand(self, rows: Int64, past: Int64, new: Int64) -> Mapping[str, int]:
        """Pages per group that these rows, with `past` cached tokens, need to go on by `new` (0: not now).

        The one price list: admission, chunking and allocation all ask it.
        """
        return self.growth(rows, past, new).demand

    def growth(self, rows: Int64, past: Int64, new: Int64) -> Growth:
        """What `demand` counts. Rows may have pages for more than their cached tokens: these they do not gain again."""
        gains, end = np.zeros(len(rows), np.bool_), past + new
        if self._tokens:
            gains = end > self.blocks.columns[rows] * self._kinds[self._cover].page_size
        if "states" in self._pool.covering:
            gains |= (new > 0) & (self._states[rows] == 0)
        which = gains.nonzero()[0]
        if not len(which):
            return self._nothing
        rows, past, end = rows[which], past[which], end[which]
        held = self.held(rows, past)
        bound = self._bound(held, end)
        columns = (held.columns, bound[self._cover][1]) if self._tokens else (which[:0], which[:0])
        demand = {name: int(np.add.reduce(high - low)) for name, (low, high) in bound.items()}
        return Growth(rows, columns, bound, demand)

    def held(self, rows: Int64, past: Int64, hits: Sequence[int] = ()) -> Held:
        """What these rows have, with `past` cached tokens, and behind them what sequences would have that started from
        hits of so many columns."""
        columns, found, begun = self.blocks.columns[rows], self._found[rows], self._states[rows] > 0
        if not hits:
            return Held(past, columns, found, begun)
        hit, size = np.array(hits, np.int64), 0 if self.cache is None else self.cache.roles.page_size
        table = hit if self._tokens else np.zeros_like(hit)
        return Held(
            np.concatenate((past, hit * size)),
            np.concatenate((columns, table)),
            np.concatenate((found, hit)),
            np.concatenate((begun, np.zeros(len(hit), np.bool_))),
        )

    def gains(self, held: Held, end: Int64) -> dict[str, Int64]:
        """Pages per group that each of these gains to go on to `end` tokens, any shape whose last axis is theirs."""
        return {name: high - low for name, (low, high) in self._bound(held, end).items()}

    def outlook(self, held: Held, later: Int64, alive: Float64) -> dict[str, Int64]:
        """Pages per group that these are expected to gain (or give back: below 0) until each of several moments.

        Who ended gives back what it was the first to compute: a page that several use counts once at most. Rounded up.

        Args:
            later: [moments, sequences] tokens cached by then, a decode on top of which must fit.
            alive: [moments, sequences] chance that the sequence has not ended.
        """
        one, gains = np.ones_like(later), {}
        for name, kind in self._kinds.items():
            if kind.space == "tokens":
                length, found, columns = held.past, held.found, held.columns
            else:
                length, found = np.where(held.begun, held.past, 0), np.zeros_like(held.past)
                columns = kind.columns(length)
            dead = kind.dead(length)
            pages = columns - np.minimum(dead, columns)
            own = columns - np.minimum(np.maximum(dead, found), columns)
            expected = alive * (kind.held(later, one) - pages + own) - own
            gains[name] = np.ceil(expected.sum(axis=1)).astype(np.int64)
        return gains

    def commit(self, plan: Plan, growth: Growth) -> None:
        """Carry out the plan for the growth's demand: its ids become the rows' next columns and states."""
        rows, bound = growth.rows, growth.bound
        binds: dict[str, Int32] = {}
        if len(rows):
            for name, (low, high) in bound.items():
                self._taken[name][rows] += high - low
            if self._tokens:
                which, columns = ragged(*growth.columns)
                ids = np.zeros(len(columns), np.int32)
                ids[columns >= bound[self._cover][0][which]] = plan.ids["tokens"]
                self.blocks.append(rows[which], columns, ids)
                binds = {name: ids[columns >= bound[name][0][which]] for name in self._some}
            if "states" in plan.ids:
                self._states[rows[self._states[rows] == 0]] = plan.ids["states"]
        self._pool.commit(plan, binds)
        if self._restore:
            self._restore_states(rows)

    def unbind_passed(self, rows: Int64, past: Int64) -> None:
        """Give back the pages that no query at `past` or later can see, of all these rows at once."""
        self._locked = None
        for name, passed in self._passed.items():
            # A restored row starts at its hit, which may lie above what a row that came here itself would keep.
            before, dead = passed[rows], np.minimum(self._kinds[name].dead(past), self.blocks.columns[rows])
            some = (dead > before).nonzero()[0]
            if not len(some):
                continue
            ones, dead = rows[some], dead[some]
            which, columns = ragged(before[some], dead)
            passed[ones] = dead
            ids = self.blocks.ids(ones[which], columns)
            ids = self._unlock(name, ids[ids > 0])
            if name == self._cover:
                self.blocks.clear(ones[which], columns)
                self._pool.release("tokens", ids)
            elif len(ids):
                # Of a chunk longer than the window only the tail ever had pages.
                self._pool.unbind(name, ids[self._pool.is_bound(name, ids)])

    def free_passed(self, rows: Int64, past: Int64) -> None:
        """The same, but if all there is to give back are locks on pages of the prefix cache, which frees nothing, then
        in `unlock_passed`."""
        for name, passed in self._passed.items():
            kept = passed[rows] if name == self._cover else np.maximum(passed[rows], self._known[rows])
            if np.count_nonzero(np.minimum(self._kinds[name].dead(past), self.blocks.columns[rows]) > kept):
                self.unbind_passed(rows, past)
                return
        self._locked = rows, past

    def unlock_passed(self) -> None:
        """Before anybody asks what could be evicted: finish what `free_passed` has left."""
        if self._locked is not None:
            self.unbind_passed(*self._locked)

    def states(self, rows: Int64) -> Int32:
        """The id of each row's state page; empty if the model keeps no states."""
        return self._states[rows] if "states" in self._pool.covering else np.zeros(0, np.int32)

    def take_row(self, match: Match | None = None) -> int:
        """A row for a sequence that starts to run, from a hit if there is one. IndexError when all are taken."""
        row = self.blocks.take_row()
        for passed in self._passed.values():
            passed[row] = 0
        for taken in self._taken.values():
            taken[row] = 0
        self._known[row] = self._found[row] = 0
        if match is not None and match.columns:
            assert self.cache is not None
            ids = self.cache.acquire(match)
            columns = np.arange(match.columns)
            if self._tokens:
                self.blocks.append(np.full(match.columns, row), columns, ids)
            for name, passed in self._passed.items():
                passed[row] = match.starts[name]
            self._known[row] = self._found[row] = match.columns
            if match.snapshot:
                self._restore[row] = match.snapshot
        return row

    def taken(self, row: int) -> dict[str, int]:
        """Fresh pages per group that the row has had so far."""
        return {name: int(taken[row]) for name, taken in self._taken.items()}

    def restoring(self, row: int) -> bool:
        """Does the row hold a snapshot that is not copied yet?"""
        return row in self._restore

    def to_share(self, rows: Int64, past: Int64) -> Int64:
        """Which of these have computed full pages that the prefix cache does not know: places in `rows`."""
        assert self.cache is not None
        return np.flatnonzero(past // self.cache.roles.page_size > self._known[rows])

    def share(self, rows: Int64, past: Int64, names: Sequence[Names]) -> None:
        """Hand the prefix cache the full pages that these rows have computed; they use them from there on."""
        assert self.cache is not None
        full, known = past // self.cache.roles.page_size, self._known[rows]
        which, columns = ragged(known, full)
        if not len(which):
            return
        own = self.blocks.ids(rows[which], columns) if self._tokens else np.zeros(len(which), np.int32)
        ids = self.cache.insert(names, known, full, own)
        changed = (ids != own).nonzero()[0]
        if len(changed):
            self.blocks.replace(rows[which[changed]], columns[changed], ids[changed])
            np.maximum.at(self._found, rows[which[changed]], columns[changed] + 1)
        self._known[rows] = full

    def keep(self, row: int, past: int, names: Names) -> None:
        """Somebody may come back to where this row is; with a snapshot of its state, if there is room for one when
        `save` is called, which is before anything else happens to the row."""
        if self.cache is None:
            return
        size = self.cache.roles.page_size
        columns = past // size
        if past % size == 0 and self._states[row] and self.cache.lacks_snapshot(names, columns):
            self._to_save.setdefault(names.pages[columns - 1], (row, columns, names))
        self.cache.keep(names, columns)

    def save(self) -> None:
        """Take the snapshots that are due, as many of them as there is room for, at once."""
        due, self._to_save = list(self._to_save.values()), {}
        if not due:
            return
        assert self.cache is not None
        groups = self.cache.roles.states
        while due and not isinstance(plan := self._pool.plan(dict.fromkeys(groups, len(due))), Plan):
            due.pop()
            while due and not self._pool.could(dict.fromkeys(groups, len(due))):
                due.pop()
        if not due:
            return
        assert isinstance(plan, Plan)
        self._pool.commit(plan)
        for name in groups:
            self._pool.copy(name, self._states[[row for row, _, _ in due]], plan.ids["states"])
        for (_, columns, names), snapshot in zip(due, plan.ids["states"].tolist(), strict=True):
            self.cache.keep(names, columns, snapshot)

    def _bound(self, held: Held, end: Int64) -> dict[str, tuple[Int64, Int64]]:
        """Columns [low, high) per group that each of these binds pages to in going on to `end` tokens: the prices."""
        bound = {}
        if self._tokens:  # whose pages are of one size
            have = held.columns * self._kinds[self._cover].page_size
            new = np.maximum(end - have, 0)
        for name, kind in self._kinds.items():
            if kind.space == "tokens":
                bound[name] = kind.extend(have, new)
            else:  # what a hit restores is tokens; the state page it is copied to must still be had
                bound[name] = kind.extend(np.where(held.begun, held.past, 0), end - held.past)
        return bound

    def vacate(self, rows: Sequence[int]) -> None:
        """Give back rows and all their pages of every kind, one release per id space."""
        if not rows:
            return
        for row in rows:
            if row in self._restore:
                self._forget_snapshot(row)
        taken = np.array(rows, np.int64)
        for name, passed in self._passed.items():
            if name != self._cover and self.cache is not None:
                which, columns = ragged(passed[taken], self.blocks.columns[taken])
                ids = self.blocks.ids(taken[which], columns)
                self.cache.unlock(name, ids[ids > 0])
        ids = np.concatenate([self.blocks.give_row(row) for row in rows])
        if self._tokens:
            self._pool.release("tokens", self._unlock(self._cover, ids))
        states = self._states[taken]
        if states.any():
            self._pool.release("states", states[states > 0])
            self._states[taken] = 0

    # -- inside ---------------------------------------------------------------------------------------------

    def _unlock(self, name: str, ids: Int32) -> Int32:
        """The rows need these no more in this group; those that are not the cache's."""
        return ids if self.cache is None else ids[self.cache.unlock(name, ids.astype(np.int64))]

    def _restore_states(self, rows: Int64) -> None:
        for row in [row for row in rows.tolist() if row in self._restore]:
            assert self.cache is not None
            for name in self.cache.roles.states:
                self._pool.copy(name, [self._restore[row]], [int(self._states[row])])
            self._forget_snapshot(row)

    def _forget_snapshot(self, row: int) -> None:
        assert self.cache is not None
        self.cache.unlock(self.cache.roles.states[0], np.array([self._restore.pop(row)]))
