"""A pool's life as a file: every change and refusal with its outcome, and who the pages belong to, in a ring of bytes.

A memory bug report is a file. It starts anywhere: the ring consists of segments (ring.py), each of which begins with
the pool's whole state (snapshot.py), so the oldest may be overwritten and the rest still replays bit for bit.
What a record says is in records.py; `isthmus.memory.replay` executes one again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.memory import ring, snapshot
from isthmus.memory.delta import Op
from isthmus.memory.owners import Owners
from isthmus.memory.records import Code, IntLike, JournalError, outcome, pack, wide

if TYPE_CHECKING:
    from isthmus.memory.pool import Pool

VERSION = 2
DEFAULT_BYTES = 64 << 20
_SHARE = 8  # a segment's records fill this part of the ring, or as much as its snapshot if that is more


class Journal:
    """Writes one pool's journal. What is recorded is the operating system's at once: nothing has to be flushed.

    Args:
        path: a journal that is there already becomes `FILE.1`, that one `FILE.2`, up to 9; see `kept`.
        ring_bytes: what it may take on disk, all of it from the start; None: 64 MiB, or what a large pool needs.
        about: what else the header says, for whoever reads it: the model, say.
        clock: seconds, of the steps.

    JournalError (a ValueError) when the file cannot be had, or is too small for the pool it is for.
    """

    def __init__(
        self,
        path: str | Path,
        ring_bytes: int | None = None,
        *,
        about: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.ring_bytes = ring_bytes
        self.records = 0  # so far, those that the ring has dropped included
        self.about = dict(about or {})
        self._clock = clock
        self._file, self.kept = ring.claim(self.path)
        self._ring: ring.Ring | None = None
        self._pool: Pool | None = None

    def begin(self, pool: Pool) -> None:
        """Write the header and where the pool stands. Called by the pool; a second pool needs a journal of its own."""
        if self._pool is not None:
            raise ValueError(f"{self.path}: this journal already belongs to a pool; open one per pool")
        least = least_bytes(pool)
        size = max(DEFAULT_BYTES, least) if self.ring_bytes is None else self.ring_bytes // ring.BLOCK * ring.BLOCK
        if size < least:
            raise JournalError(f"{self.path}: a pool of this size needs a journal of {least:,} bytes or more")
        try:
            self._ring = ring.Ring(self._file, _header(pool, self.about), size)
        except OSError as error:
            raise JournalError(f"{self.path}: no room for {size:,} bytes ({error.strerror})") from error
        self.ring_bytes = size
        self._pool, self._groups, self._spaces = pool, list(pool.groups), list(pool.spaces)
        self._windows = [n for n, group in pool.groups.items() if n not in pool.covering[group.space]]
        self.owners = Owners(pool.capacities)
        self._step, self._started, self._moment = 0, self._clock(), wide(0, 0)
        self._begin_segment()

    # -- what the pool reports ------------------------------------------------------------------------------

    def commit(
        self, demand: Mapping[str, int], ids: Mapping[str, IntLike], binds: Mapping[str, IntLike], ops: Sequence[Op]
    ) -> None:
        """A plan was carried out: `ids` are fresh, per space; `binds` got a page, per group."""
        for space, fresh in ids.items():
            self.owners.own(space, fresh, 0)
        wanted, some = [demand[name] for name in self._groups], [binds[name] for name in self._windows]
        self._record(Code.COMMIT, 0, wanted, *ids.values(), *some, *outcome(ops, self._groups))

    def refusal(self, demand: Mapping[str, int]) -> None:
        """A demand could not be met."""
        self._record(Code.REFUSAL, 0, [demand[name] for name in self._groups])

    def unbind(self, group: str, ids: IntLike) -> None:
        """Ids lost their pages in a group."""
        self._record(Code.UNBIND, self._groups.index(group), ids)

    def release(self, space: str, ids: IntLike) -> None:
        """Ids died."""
        self._record(Code.RELEASE, self._spaces.index(space), ids)

    def copy(self, group: str, source: IntLike, destination: IntLike) -> None:
        """Pages were copied."""
        assert self._pool is not None
        self.owners.copied(self._pool.groups[group].space, source, destination)
        self._record(Code.COPY, self._groups.index(group), source, destination)

    def rebind(self, group: str, source: IntLike, target: IntLike) -> None:
        """Pages changed their ids."""
        self._record(Code.REBIND, self._groups.index(group), source, target)

    def pin(self, group: str, ids: IntLike) -> None:
        """Places are held."""
        self._record(Code.PIN, self._groups.index(group), ids)

    def unpin(self, group: str, pages: IntLike) -> None:
        """Places are let go."""
        self._record(Code.UNPIN, self._groups.index(group), pages)

    def compact(self, ops: Sequence[Op]) -> None:
        """Holes were closed."""
        self._record(Code.COMPACT, 0, *outcome(ops, self._groups))

    def step(self) -> None:
        """The delta is taken: a step is planned."""
        self._step += 1
        self._moment = wide(self._step, int((self._clock() - self._started) * 1e6))
        self._record(Code.STEP, 0, self._moment)

    # -- what whoever serves requests reports ---------------------------------------------------------------

    def name(self, owner: str) -> int:
        """The number by which this owner goes in `own` and `left`."""
        number, new = self.owners.number(owner)
        if new:
            self._record(Code.NAME, 0, [number], _text(self.owners.names[number]))
        else:
            self.owners.gone.discard(number)
        return number

    def own(self, space: str, ids: IntLike, numbers: IntLike) -> None:
        """These ids belong to these owners now."""
        self.owners.own(space, ids, numbers)
        self._record(Code.OWN, self._spaces.index(space), ids, numbers)

    def left(self, numbers: IntLike) -> None:
        """These owners run no more."""
        self.owners.left(numbers)
        self._record(Code.LEFT, 0, numbers)

    # -- the file -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what the ring did not use; a pool that goes on writing raises."""
        if self._ring is not None:
            self._ring.close()
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, code: Code, index: int, *arrays: IntLike) -> None:
        data, at = pack(code, index, arrays), self._ring
        assert at is not None, "a journal belongs to a pool before anything is recorded"
        self.records += 1
        if not at.fits(len(data)):  # beside this segment's state: the next one's has what this record did
            self._begin_segment()
            return
        at.append(data)
        if at.used >= self._full:
            at.end()
            self._begin_segment()

    def _begin_segment(self) -> None:
        """Where the pool stands and who owns what, as records."""
        assert self._pool is not None
        assert self._ring is not None
        self.owners.keep_only({space: ids.live_ids() for space, ids in self._pool.spaces.items()})
        frames = [pack(Code.STATE, 0, [self._moment, *snapshot.state_of(self._pool)]), *self._owners_now()]
        self._ring.begin(self.records, frames)
        self.records += len(frames)
        assert self.ring_bytes is not None
        self._full = self._ring.used + max(self.ring_bytes // _SHARE, self._ring.used)

    def _owners_now(self) -> Iterator[bytes]:
        assert self.ring_bytes is not None
        room = self.ring_bytes // _SHARE
        for number, name in self.owners.names.items():
            data = pack(Code.NAME, 0, [[number], _text(name)])
            room -= len(data)
            if room > 0:  # or there are more names than a ring of this size can repeat in each segment
                yield data
        for index, of in enumerate(self.owners.of.values()):
            ids = np.flatnonzero(of)
            if len(ids):
                yield pack(Code.OWN, index, [ids, of[ids]])
        if self.owners.gone:
            yield pack(Code.LEFT, 0, [sorted(self.owners.gone)])


def least_bytes(pool: Pool) -> int:
    """The smallest ring that holds a life of this pool."""
    return 16 * ring.BLOCK + -(-2 * snapshot.most_bytes(pool) // ring.BLOCK) * ring.BLOCK


def read(path: str | Path) -> tuple[dict[str, Any], int, list[list[memoryview]]]:
    """The header, the number of the first record that is left, and the records by segment, packed.

    JournalError when the file is not a journal, or nothing in it can be read.
    """
    header, segments = ring.read(Path(path), VERSION)
    if not segments:
        raise JournalError(f"{path}: not one whole segment: the journal was cut before its pool began")
    return header, segments[0].first, [segment.frames for segment in segments]


def _header(pool: Pool, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "isthmus_journal": VERSION,
        "about": dict(about),
        "started": time.time(),
        "arena_bytes": pool.arena_bytes,
        "walls": pool.walls,
        "groups": [
            {
                "name": g.name,
                "kind": g.kind,
                "window": g.window,
                "page_size": g.spec.page_size,
                "page_bytes": g.spec.page_bytes,
            }
            for g in pool.groups.values()
        ],
    }


def _text(name: str) -> list[int]:
    return list(name.encode())
