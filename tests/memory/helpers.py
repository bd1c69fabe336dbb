"""What the memory tests share: pools of every shape, a byte-level twin of the device, random traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.memory import Copies, Delta, Frees, Group, Moves, Pool, Refusal, VirtualPages, opaque_spec


def groups_of(sizes: Mapping[str, int], page_size: int = 1) -> list[Group]:
    """Groups by name: `full*` append, `window*` window, `state*` state; the value is page bytes / 16."""
    found = []
    for name, units in sizes.items():
        kind = {"f": "append", "w": "window", "s": "state"}[name[0]]
        spec = opaque_spec(units * 16, 1 if kind == "state" else page_size)
        found.append(Group(name, spec, kind, 8 if kind == "window" else None))  # type: ignore[arg-type]
    return found


class Twin:
    """The arena as 16-byte cells, each holding the name of what was written there last: applies deltas, no more.

    Every page that is bound is stamped once, when it appears. If moves ever race, overlap or land on a
    live page, a later `verify` finds a foreign stamp.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.cells = np.full(pool.arena_bytes // 16, -1, np.int64)
        self.codes = {name: i + 1 for i, name in enumerate(pool.groups)}
        self.tables = {name: np.zeros(len(pool.table(name)), np.int64) for name in pool.groups}
        self.stamps = {name: np.zeros(len(pool.table(name)), np.int64) for name in pool.groups}
        self.clock = 0

    def apply(self, delta: Delta) -> None:
        """Execute the operations in order; new bindings are stamped when their write arrives."""
        for op in delta.ops:
            if isinstance(op, Moves | Copies):
                source, destination = self._cells(op.group, op.source), self._cells(op.group, op.destination)
                assert not np.intersect1d(source, destination).size, "a destination overlaps a source in one operation"
                self.cells[destination] = self.cells[source]
                if isinstance(op, Moves):
                    self.cells[source] = -1
                continue
            if isinstance(op, Frees):
                self.cells[self._cells(op.group, op.page)] = -1
                continue
            table, stamps = self.tables[op.group], self.stamps[op.group]
            fresh = (table[op.virtual] == 0) & (op.physical != 0)
            table[op.virtual] = op.physical
            stamps[op.virtual[op.physical == 0]] = 0
            for v, p in zip(op.virtual[fresh].tolist(), op.physical[fresh].tolist(), strict=True):
                self.clock += 1
                stamps[v] = self.clock
                self.cells[self._cells(op.group, np.array([p]))] = self.clock

    def copied(self, group: str, source: Sequence[int], destination: Sequence[int]) -> None:
        """A copy was asked for: the destinations now carry the sources' stamps."""
        self.stamps[group][np.asarray(destination)] = self.stamps[group][np.asarray(source)]

    def rebound(self, group: str, source: NDArray[np.integer], target: NDArray[np.integer]) -> None:
        """Pages changed their ids: the stamp goes with the page, and nothing is stamped again."""
        stamps = self.stamps[group]
        stamps[target], stamps[source] = stamps[source], 0
        self.tables[group][target], self.tables[group][source] = self.tables[group][source], 0

    def verify(self) -> None:
        """Tables equal the pool's, and every live page still holds its own bytes."""
        for name in self.pool.groups:
            assert np.array_equal(self.tables[name], self.pool.table(name).entries)
            ids = np.flatnonzero(self.tables[name])
            cells = self.cells[self._cells(name, self.tables[name][ids])]
            size = self.pool.groups[name].spec.page_bytes // 16
            assert (cells.reshape(len(ids), size) == self.stamps[name][ids][:, None]).all(), (
                f"bytes of {name} were lost"
            )

    def _cells(self, group: str, pages: NDArray[np.integer]) -> NDArray[np.int64]:
        size = self.pool.groups[group].spec.page_bytes // 16
        return (np.asarray(pages, np.int64)[:, None] * size + np.arange(size)).reshape(-1)


class Traffic:
    """Seeded random calls on a pool, remembering what is live. Used by the exactness, churn and journal tests."""

    def __init__(self, pool: Pool, seed: int, *, pins: bool = False) -> None:
        self.pool = pool
        self.rng = np.random.default_rng(seed)
        self.pins = pins
        self.pinned: list[tuple[str, object]] = []
        self.granted = self.refused = 0
        self.operations = 0  # pages bound, unbound or released

    def demand(self, most: int) -> dict[str, int]:
        """Equal demands for the covering groups of a space, anything up to that for windows."""
        want: dict[str, int] = {}
        for space, covering in self.pool.covering.items():
            n = int(self.rng.integers(0, most + 1))
            for name, group in self.pool.groups.items():
                if group.space == space:
                    want[name] = n if name in covering else int(self.rng.integers(0, n + 1))
        return want

    def allocate(self, most: int) -> bool:
        """Plan a random demand and commit it if it is granted; windows bind random fresh ids."""
        return self.grant(self.demand(most))

    def grant(self, want: Mapping[str, int]) -> bool:
        """Plan and commit a demand."""
        plan = self.pool.plan(want)
        if isinstance(plan, Refusal):
            self.pool.refused(plan)
            self.refused += 1
            return False
        binds = {}
        for name, group in self.pool.groups.items():
            if name not in self.pool.covering[group.space]:
                binds[name] = self.rng.permutation(np.asarray(plan.ids[group.space]))[: want[name]]
        self.pool.commit(plan, binds)
        self.granted += 1
        self.operations += sum(want.values())
        return True

    def release(self, share: float) -> None:
        """Release a random share of the live ids of every space, sparing pinned ones."""
        for space, ids in self.pool.spaces.items():
            live = self._unpinned(space, np.asarray(ids.live_ids()))
            chosen = live[self.rng.random(len(live)) < share]
            if len(chosen):
                self.operations += len(chosen)
                self.pool.release(space, self.rng.permutation(chosen))

    def unbind(self, share: float) -> None:
        """Unbind a random share of every window group's ids."""
        for name, group in self.pool.groups.items():
            if name in self.pool.covering[group.space]:
                continue
            live = self._unpinned(group.space, np.flatnonzero(self.pool.table(name).entries))
            chosen = live[self.rng.random(len(live)) < share]
            if len(chosen):
                self.operations += len(chosen)
                self.pool.unbind(name, self.rng.permutation(chosen))

    def rebind(self) -> tuple[str, NDArray[np.integer], NDArray[np.integer]] | None:
        """Hand some pages of a window group to ids that have none there."""
        for name, group in self.pool.groups.items():
            if name in self.pool.covering[group.space]:
                continue
            ids = np.asarray(self.pool.ids(group.space).live_ids())
            bound = self.pool.is_bound(name, ids)
            source = self._unpinned(group.space, ids[bound])
            n = min(3, len(source), int((~bound).sum()))
            if n:
                source, target = source[:n], ids[~bound][:n]
                self.pool.rebind(name, source, target)
                return name, source, target
        return None

    def pin(self) -> None:
        """Pin one random bound id of one random group, or let an old pin go."""
        if len(self.pinned) > 2 or (self.pinned and self.rng.random() < 0.5):  # or pins take the whole arena
            name, pages = self.pinned.pop(int(self.rng.integers(len(self.pinned))))
            self.pool.unpin(name, pages)  # type: ignore[arg-type]
            return
        name = str(self.rng.choice(list(self.pool.groups)))
        bound = np.flatnonzero(self.pool.table(name).entries)
        if len(bound):
            self.pinned.append((name, self.pool.pin(name, self.rng.choice(bound, 1))))

    def _unpinned(self, space: str, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        keep = np.ones(len(ids), bool)
        for name, group in self.pool.groups.items():
            if group.space == space and self.pool.regions[name].pins:
                pages = np.asarray(self.pool.table(name).translate(ids))
                keep &= ~np.isin(pages, list(self.pool.regions[name].pins))
        return ids[keep]


def live(pool: Pool, space: str = "tokens") -> VirtualPages:
    """All live ids of a space."""
    return pool.ids(space).live_ids()
