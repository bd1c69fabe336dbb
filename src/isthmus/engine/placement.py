"""Where the running sequences' pages are: rows, block tables and states, and what each step binds and gives back.

row r:  columns [0, blocks.columns[r]) have ids where some group has a page
        columns [0, passed[g][r]) of window group g have no page any more
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.cache import CacheKind, kind_of
from isthmus.engine.blocks import BlockTables, ragged
from isthmus.memory import Plan, Pool

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Placement:
    """The one place where a scheduler's lengths become pages of the pool. Arrays have one entry per sequence."""

    def __init__(self, pool: Pool, num_rows: int) -> None:
        self.blocks = BlockTables(num_rows)
        self._pool = pool
        self._kinds: dict[str, CacheKind] = {name: kind_of(group) for name, group in pool.groups.items()}
        self._tokens = [name for name, kind in self._kinds.items() if kind.space == "tokens"]
        self._cover = pool.covering["tokens"][0] if self._tokens else ""  # binds every live id
        windows = [name for name in self._tokens if pool.groups[name].kind == "window"]
        # A window that covers the ids comes last: its ids die, where others only unbind.
        windows.sort(key=lambda name: name == self._cover)
        self._passed = {name: np.zeros(num_rows, np.int64) for name in windows}
        self._states = np.zeros(num_rows, np.int32)  # id of each row's state page, 0 before the first step

    def demand(self, past: Int64, new: Int64) -> dict[str, int]:
        """Pages per group that sequences of `past` cached tokens need to go on by `new` (0: not now).

        The one price list: admission, chunking and allocation all ask it.
        """
        busy = new > 0
        past, new = past[busy], new[busy]
        return {name: int(np.subtract(*kind.extend(past, new)[::-1]).sum()) for name, kind in self._kinds.items()}

    def commit(self, plan: Plan, rows: Int64, past: Int64, new: Int64) -> None:
        """Carry out the plan for `demand(past, new)`: its ids become the rows' next columns and states."""
        binds: dict[str, Int32] = {}
        if self._tokens:
            kind = self._kinds[self._cover]
            which, columns = ragged(kind.columns(past), kind.columns(past + new))
            need = {name: columns >= self._kinds[name].extend(past, new)[0][which] for name in self._tokens}
            ids = np.zeros(len(columns), np.int32)
            ids[need[self._cover]] = plan.ids["tokens"]
            self.blocks.append(rows[which], columns, ids)
            binds = {name: ids[mask] for name, mask in need.items()}
        if "states" in plan.ids:
            self._states[rows[past == 0]] = plan.ids["states"]
        self._pool.commit(plan, binds)

    def unbind_passed(self, rows: Int64, past: Int64) -> None:
        """Give back the pages that no query at `past` or later can see, of all these rows at once."""
        for name, passed in self._passed.items():
            dead = np.minimum(self._kinds[name].dead(past), self.blocks.columns[rows])
            if not (dead > passed[rows]).any():
                continue
            which, columns = ragged(passed[rows], dead)
            passed[rows] = dead
            ids = self.blocks.ids(rows[which], columns)
            ids = ids[ids > 0]
            if name == self._cover:
                self.blocks.clear(rows[which], columns)
                self._pool.release("tokens", ids)
            else:
                # Of a chunk longer than the window only the tail ever had pages.
                self._pool.unbind(name, ids[self._pool.is_bound(name, ids)])

    def states(self, rows: Int64) -> Int32:
        """The id of each row's state page; empty if the model keeps no states."""
        return self._states[rows] if "states" in self._pool.covering else np.zeros(0, np.int32)

    def take_row(self) -> int:
        """A row for a sequence that starts to run. IndexError when all are taken."""
        row = self.blocks.take_row()
        for passed in self._passed.values():
            passed[row] = 0
        return row

    def vacate(self, rows: Sequence[int]) -> None:
        """Give back rows and all their pages of every kind, one release per id space."""
        if not rows:
            return
        ids = np.concatenate([self.blocks.give_row(row) for row in rows])
        if self._tokens:
            self._pool.release("tokens", ids)
        states = self._states[list(rows)]
        if states.any():
            self._pool.release("states", states[states > 0])
            self._states[list(rows)] = 0
