"""Execute a journal again, without a device: the same calls on a fresh pool, every outcome compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.memory import snapshot
from isthmus.memory.delta import Op
from isthmus.memory.group import Group
from isthmus.memory.ids import PhysicalPages
from isthmus.memory.journal import read
from isthmus.memory.owners import Owners
from isthmus.memory.plan import Refusal
from isthmus.memory.pool import Pool
from isthmus.memory.records import Code, Int32, IntLike, JournalError, Record, narrow, outcome, unpack
from isthmus.memory.spec import PageSpec

_TELLING = frozenset((Code.NAME, Code.OWN, Code.LEFT, Code.STATE))
"""Records that change nothing."""


@dataclass(frozen=True)
class Event:
    """One record that was executed, and what it did."""

    number: int  # of the record, from the start of the pool's life
    code: Code
    step: int  # that it came before, or that it is
    seconds: float  # of the newest step, since the start
    record: Record
    ops: Sequence[Op]  # what a device had to do
    index: int  # of the record among those in the file


class DivergenceError(JournalError):
    """The first record whose outcome here is not the recorded one."""

    def __init__(self, path: str, message: str, event: Event) -> None:
        super().__init__(f"{path}: record {event.number} ({event.code.name.lower()}), step {event.step}: {message}")
        self.event = event


class Replay:
    """A journal being executed: iterate, once, and `pool` and `owners` are as they were behind each event.

    JournalError when the file is no journal; DivergenceError, out of the loop, names the first difference.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header, self.first, self._segments = read(path)
        self.records = sum(map(len, self._segments))
        try:
            self.pool = _pool(self.header)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"{path}: its header describes no pool: {error}") from error
        self.owners = Owners(self.pool.capacities)
        self.step, self.seconds = 0, 0.0
        self.settled = True  # no more is told, before the next change, of whose the pages are
        self._begun = False
        self._groups, self._spaces = list(self.pool.groups), list(self.pool.spaces)

    @property
    def segments(self) -> int:
        """How many of them are in the file and follow on each other."""
        return len(self._segments)

    def __iter__(self) -> Iterator[Event]:
        assert not self._begun, "a replay runs once"
        self._begun = True
        frames = [frame for segment in self._segments for frame in segment]
        for index, frame in enumerate(frames):
            record = unpack(frame)
            self.settled = index + 1 == len(frames) or frames[index + 1][0] not in _TELLING
            yield self._execute(Event(self.first + index, record.code, self.step + 1, self.seconds, record, (), index))

    def _execute(self, event: Event) -> Event:
        record = event.record
        ops: Sequence[Op] = ()
        try:
            if record.code is Code.STATE:
                self._stand(event)
            elif record.code is Code.STEP:
                self.step, self.seconds = _moment(record.arrays[0])
            elif record.code in _TELLING:
                self._tell(record)
            else:
                ops = self._call(event)
        except (ValueError, IndexError, TypeError) as error:
            if isinstance(error, JournalError):
                raise
            raise DivergenceError(str(self.path), f"cannot be repeated: {error}", event) from error
        step = event.step if event.code not in _TELLING and event.code is not Code.STEP else self.step
        return replace(event, step=step, seconds=self.seconds, ops=ops)

    def _stand(self, event: Event) -> None:
        """Start here, or be here."""
        moment, *arrays = event.record.arrays
        if not event.index:
            snapshot.restore(self.pool, arrays)
            self.step, self.seconds = _moment(moment)
            return
        now = snapshot.state_of(self.pool)
        if len(now) != len(arrays) or not all(np.array_equal(a, b) for a, b in zip(now, arrays, strict=True)):
            raise DivergenceError(str(self.path), "the state that the next segment starts with is another", event)

    def _tell(self, record: Record) -> None:
        first, *more = record.arrays
        if record.code is Code.NAME:
            self.owners.put(int(first[0]), bytes(more[0].tolist()).decode(errors="replace"))
        elif record.code is Code.OWN:
            self.owners.own(self._spaces[record.index], first, more[0])
            self.owners.gone.difference_update(np.unique(more[0]).tolist())
        else:
            self.owners.left(first)

    def _call(self, event: Event) -> Sequence[Op]:
        """Make the call that a record stands for."""
        pool, record, arrays = self.pool, event.record, event.record.arrays
        if record.code in (Code.COMMIT, Code.REFUSAL):
            return self._plan(event)
        if record.code is Code.COMPACT:
            pool.compact()
            return self._compare(event, arrays, {})
        if record.code is Code.RELEASE:
            pool.release(self._spaces[record.index], arrays[0])
            return pool.take_delta().ops
        group = self._groups[record.index]
        if record.code is Code.UNBIND:
            pool.unbind(group, arrays[0])
        elif record.code is Code.COPY:
            pool.copy(group, arrays[0], arrays[1])
            self.owners.copied(pool.groups[group].space, arrays[0], arrays[1])
        elif record.code is Code.REBIND:
            pool.rebind(group, arrays[0], arrays[1])
        elif record.code is Code.PIN:
            pool.pin(group, arrays[0])
        else:
            assert record.code is Code.UNPIN
            pool.unpin(group, arrays[0].view(PhysicalPages))
        return pool.take_delta().ops

    def _plan(self, event: Event) -> Sequence[Op]:
        pool, arrays = self.pool, event.record.arrays
        demand = dict(zip(self._groups, arrays[0].tolist(), strict=True))
        plan = pool.plan(demand)
        asked = ", ".join(f"{n} {name}" for name, n in demand.items() if n) or "no"
        if isinstance(plan, Refusal):
            if event.code is Code.COMMIT:
                raise self._differs(event, f"{asked} pages", "granted", f"refused ({plan.message})")
            pool.refused(plan)
            return ()
        if event.code is Code.REFUSAL:
            raise self._differs(event, f"{asked} pages", "refused", "granted")
        windows = [n for n, group in pool.groups.items() if n not in pool.covering[group.space]]
        done = 1 + len(self._spaces) + len(windows)
        for space, fresh in zip(self._spaces, arrays[1:], strict=False):
            self._compare_arrays(event, f"fresh ids of {space!r}", fresh, plan.ids[space], space, fresh)
            self.owners.own(space, fresh, 0)
        binds = dict(zip(windows, arrays[done - len(windows) : done], strict=True))
        pool.commit(plan, binds)
        fresh_of = {name: np.asarray(plan.ids[group.space]) for name, group in pool.groups.items()}
        return self._compare(event, arrays[done:], fresh_of | binds)

    def _compare(self, event: Event, want: Sequence[Int32], bound: Mapping[str, IntLike]) -> Sequence[Op]:
        """Moves and pages given, against the recorded ones; `bound`: the ids that pages were given to."""
        ops = self.pool.take_delta().ops
        kinds, *got = outcome(ops, self._groups)
        if list(kinds) != want[0].tolist():
            raise self._differs(event, "what was done", self._kinds(want[0].tolist()), self._kinds(list(kinds)))
        pairs = zip(want[1:], got, strict=True)
        for kind in list(kinds):
            group = self._groups[kind // 2]
            space = self.pool.groups[group].space
            if kind % 2:
                self._compare_arrays(event, f"pages of {group!r}", *next(pairs), space, bound.get(group, ()))
            else:
                for end in ("from", "to"):
                    self._compare_arrays(event, f"pages of {group!r} moved {end}", *next(pairs), space, ())
        return ops

    def _compare_arrays(self, event: Event, what: str, want: IntLike, got: IntLike, space: str, ids: IntLike) -> None:
        if np.array_equal(want, got):
            return
        if len(want) != len(got):
            raise self._differs(event, f"number of {what}", str(len(want)), str(len(got)))
        first = int(np.flatnonzero(np.asarray(want) != np.asarray(got))[0])
        if first < len(ids):
            what += f", id {ids[first]} of {self.owners.name_of(space, int(ids[first]))}"
        raise self._differs(event, f"{what} (entry {first})", str(want[first]), str(got[first]))

    def _differs(self, event: Event, what: str, want: str, got: str) -> DivergenceError:
        return DivergenceError(str(self.path), f"{what}: recorded {want}, here {got}", event)

    def _kinds(self, kinds: list[int]) -> str:
        named = [f"{'pages given' if kind % 2 else 'moves'} in {self._groups[kind // 2]}" for kind in kinds]
        return ", ".join(named) or "nothing"


def replay(path: str | Path, each: Callable[[int, Code, Pool], None] | None = None) -> Pool:
    """Rebuild the pool that a journal describes, bit for bit.

    `each(record number, what it was, pool)` is called after every record (to check, to draw). Errors as `Replay`'s.
    """
    life = Replay(path)
    for event in life:
        if each is not None:
            each(event.number, event.code, life.pool)
    return life.pool


def _pool(header: dict[str, Any]) -> Pool:
    groups = [
        Group(g["name"], PageSpec(g["page_size"], g["page_bytes"], ()), g["kind"], g["window"])
        for g in header["groups"]
    ]
    return Pool(header["arena_bytes"], groups, walls=header["walls"])


def _moment(array: Int32) -> tuple[int, float]:
    step, microseconds = narrow(array)
    return step, microseconds / 1e6
