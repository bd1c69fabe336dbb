"""The arena over time in frames small enough to draw: what lay where, whose it was, and what moved.

    cell     `per_cell` pages in a row on a group's own grid; one page in all but very large arenas
    frame    the arena behind a step, as the cells that changed since the frame before it
    row      [cell, live pages, id, owner, since]   of the cell's first live page; zeros where there is none

A long journal gets too many frames or changes: then neighbours are merged in pairs, as often as it takes, so the cost
is bounded whatever its length, and every part of it keeps the same resolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from isthmus.memory import Moves, Replay, Writes
from isthmus.memory.records import Code
from isthmus.memory.replay import Event

Int32 = NDArray[np.int32]

MOST_FRAMES = 720
MOST_CHANGES = 400_000
MOST_CELLS = 16_384
MOST_JUMPS = 24  # of a frame; the largest

_CELL, _LIVE, _ID, _OWNER, _SINCE = range(5)


@dataclass
class Frame:
    """The arena behind a step. Lists have one entry per group, in byte order."""

    step: int
    seconds: float
    record: int
    spans: list[tuple[int, int]]  # in pages
    live: list[int]
    changes: list[Int32]  # [n, 5], rows as above, ascending cells
    moved: list[int]  # pages, since the frame before
    refusals: int  # likewise
    jumps: Int32  # [n, 4]: group, source page, destination page, pages: runs that moved since the frame before

    def merged(self, later: Frame) -> Frame:
        """Both in one."""
        jumps = np.concatenate((self.jumps, later.jumps))
        return Frame(
            later.step,
            later.seconds,
            later.record,
            later.spans,
            later.live,
            [_newest(a, b) for a, b in zip(self.changes, later.changes, strict=True)],
            [a + b for a, b in zip(self.moved, later.moved, strict=True)],
            self.refusals + later.refusals,
            jumps[np.argsort(-jumps[:, 3], kind="stable")[:MOST_JUMPS]],
        )


@dataclass
class Timeline:
    """Collected while a replay runs: `note` after every event, `finish` at the end."""

    life: Replay
    frames: list[Frame] = field(init=False, default_factory=list)
    names: dict[int, str] = field(init=False, default_factory=dict)  # of owners that stand in some frame
    most_frames: int = MOST_FRAMES
    most_changes: int = MOST_CHANGES
    most_cells: int = MOST_CELLS

    def __post_init__(self) -> None:
        pool = self.life.pool
        self.groups = list(pool.groups)
        pages = {name: pool.num_pages(name) for name in self.groups}
        most = max(1, self.most_cells // len(self.groups))
        self.per_cell = {name: max(1, -(-n // most)) for name, n in pages.items()}
        self.cells = {name: -(-n // self.per_cell[name]) for name, n in pages.items()}
        self._last = {name: np.zeros((4, self.cells[name]), np.int32) for name in self.groups}
        self._since = {name: np.zeros(len(pool.table(name)), np.int32) for name in self.groups}
        self._every, self._waiting, self._due = 1, 0, False
        self._changes = 0
        self._moved = dict.fromkeys(self.groups, 0)
        self._refusals = 0
        self._jumps: list[tuple[int, int, int, int]] = []

    def note(self, event: Event) -> None:
        """An event was executed."""
        self._follow(event)
        if event.code is Code.STEP:
            self._waiting += 1
            self._due = self._due or self._waiting >= self._every
        elif event.code is Code.STATE and not self.frames:
            self._due = True
        elif event.code is Code.REFUSAL:
            self._refusals += 1
        if self._due and self.life.settled:
            self._take(event)

    def finish(self, event: Event | None) -> None:
        """The journal ends with this event: what came after the last frame is one more."""
        if event is not None and (not self.frames or self.frames[-1].record < event.number):
            self._take(event)

    def halve(self) -> None:
        """Merge frames in pairs; the first, where it all starts, stays."""
        first, rest = self.frames[:1], self.frames[1:]
        pairs = [a.merged(b) for a, b in zip(rest[::2], rest[1::2], strict=False)]
        self.frames = first + pairs + rest[len(pairs) * 2 :]
        self._every *= 2
        self._changes = sum(len(rows) for frame in self.frames for rows in frame.changes)

    def states(self) -> Iterator[tuple[Frame, list[Int32]]]:
        """Each frame with all its cells per group, [4, cells]: live pages, id, owner, since. Changed in place."""
        states = [np.zeros((4, self.cells[name]), np.int32) for name in self.groups]
        for frame in self.frames:
            for state, rows in zip(states, frame.changes, strict=True):
                state[:, rows[:, _CELL]] = rows[:, _LIVE:].T
            yield frame, states

    def _follow(self, event: Event) -> None:
        """Since when ids have their pages, and what moved."""
        moved = False
        for op in event.ops:
            if isinstance(op, Moves):
                self._moved[op.group] += len(op.source)
                self._jumps += _runs(self.groups.index(op.group), op.source, op.destination)
            elif isinstance(op, Writes) and not moved:
                self._since[op.group][op.virtual[op.physical > 0]] = event.step
            moved = isinstance(op, Moves)

    def _take(self, event: Event) -> None:
        regions = self.life.pool.regions
        jumps = np.array(sorted(self._jumps, key=lambda jump: -jump[3])[:MOST_JUMPS], np.int32).reshape(-1, 4)
        changes = [self._changed(name) for name in self.groups]
        self.frames.append(
            Frame(
                self.life.step,
                self.life.seconds,
                event.number,
                [(regions[name].lo, regions[name].hi) for name in self.groups],
                [regions[name].live for name in self.groups],
                changes,
                list(self._moved.values()),
                self._refusals,
                jumps,
            )
        )
        self._due, self._waiting, self._refusals, self._jumps = False, 0, 0, []
        self._moved = dict.fromkeys(self.groups, 0)
        self._changes += sum(map(len, changes))
        while len(self.frames) > 3 and (len(self.frames) > self.most_frames or self._changes > self.most_changes):
            self.halve()

    def _changed(self, name: str) -> Int32:
        now, before = self._cells(name), self._last[name]
        cells = np.flatnonzero((now != before).any(axis=0))
        self._last[name] = now
        for number in np.unique(now[2, cells]).tolist():
            if number and number in self.life.owners.names:
                self.names[number] = self.life.owners.names[number]
        return np.concatenate((cells[:, None], now[:, cells].T), axis=1, dtype=np.int32, casting="unsafe")

    def _cells(self, name: str) -> Int32:
        pool, per = self.life.pool, self.per_cell[name]
        owner = np.zeros(self.cells[name] * per, np.int32)
        owner[: pool.num_pages(name)] = pool.regions[name].owner
        grid = owner.reshape(-1, per)
        ids = grid[np.arange(len(grid)), (grid > 0).argmax(axis=1)]
        named = self.life.owners.of[pool.groups[name].space][ids]
        return np.stack(((grid > 0).sum(axis=1), ids, named * (ids > 0), self._since[name][ids] * (ids > 0))).astype(
            np.int32
        )


def _newest(a: Int32, b: Int32) -> Int32:
    rows = np.concatenate((b, a))
    _, first = np.unique(rows[:, _CELL], return_index=True)
    return rows[first]


def _runs(group: int, source: Int32, destination: Int32) -> Sequence[tuple[int, int, int, int]]:
    """Neighbours that stay neighbours, either way round, as one."""
    if not len(source):
        return []
    steps = np.stack((np.diff(source), np.diff(destination)))
    broken = np.flatnonzero((np.abs(steps) != 1).any(axis=0)) + 1
    starts = np.concatenate(([0], broken))
    ends = np.concatenate((broken, [len(source)]))
    return [
        (group, int(source[a:b].min()), int(destination[a:b].min()), int(b - a))
        for a, b in zip(starts, ends, strict=True)
    ]
