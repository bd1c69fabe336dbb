"""A pool's life as a file: every change and refusal, with its outcome, so that a memory bug report is a file.

    line 1   JSON: version, arena bytes, walls, groups (name, kind, window, page size, page bytes)
    then     records: <op u8> <group or space u8> <arrays u16>, and per array <length u32> <int32 ...>

A journal that ends in the middle of a record (the process was killed) is good up to there.
`isthmus.memory.replay` executes one again.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.delta import Moves, Op, Writes

if TYPE_CHECKING:
    from isthmus.memory.pool import Pool

VERSION = 1
_RECORD = struct.Struct("<BBH")
_LENGTH = struct.Struct("<I")
Int32 = NDArray[np.int32]
IntLike = NDArray[np.integer] | Sequence[int]


class JournalError(ValueError):
    """A file that is no journal, or one whose recorded outcome differs from the replay's."""


class Code(enum.IntEnum):
    """What a record says. The arrays of each are listed beside it."""

    COMMIT = 1  # demand per group; ids per group; then the outcome (see `outcome`)
    REFUSAL = 2  # demand per group
    UNBIND = 3  # ids
    RELEASE = 4  # ids (the index names the space)
    COPY = 5  # source ids, destination ids
    PIN = 6  # ids
    UNPIN = 7  # physical pages
    COMPACT = 8  # the outcome
    REBIND = 9  # source ids, target ids


def outcome(ops: Sequence[Op], groups: Sequence[str]) -> list[IntLike]:
    """Moves and table writes as arrays: `[0 move | 1 write, group index]`, then the two columns."""
    arrays: list[IntLike] = []
    for op in ops:
        if isinstance(op, Writes):
            arrays += [[1, groups.index(op.group)], op.virtual, op.physical]
        elif isinstance(op, Moves):
            arrays += [[0, groups.index(op.group)], op.source, op.destination]
    return arrays


class Journal:
    """Writes one pool's journal. Buffered; `flush` or `close` to be sure it is on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO = self.path.open("wb")
        self._groups: list[str] = []
        self._spaces: list[str] = []

    def begin(self, pool: Pool) -> None:
        """Write the header. Called by the pool; a second pool needs a journal of its own."""
        if self._groups:
            raise ValueError(f"{self.path}: this journal already belongs to a pool; open one per pool")
        self._groups, self._spaces = list(pool.groups), sorted(pool.spaces)
        header = {
            "isthmus_journal": VERSION,
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
        self._file.write(json.dumps(header).encode() + b"\n")

    def commit(self, demand: Mapping[str, int], binds: Mapping[str, IntLike], ops: Sequence[Op]) -> None:
        """A plan was carried out."""
        wanted = [demand[name] for name in self._groups]
        self._record(Code.COMMIT, 0, wanted, *(binds[name] for name in self._groups), *outcome(ops, self._groups))

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

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; a pool that goes on writing raises."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, code: Code, index: int, *arrays: IntLike) -> None:
        parts = [_RECORD.pack(code, index, len(arrays))]
        for array in arrays:
            parts += [_LENGTH.pack(len(array)), np.asarray(array, "<i4").tobytes()]
        self._file.write(b"".join(parts))


def read(path: str | Path) -> tuple[dict[str, Any], Iterator[tuple[Code, int, list[Int32]]]]:
    """The header and the whole records of a journal. JournalError when the file is not one."""
    data = Path(path).read_bytes()
    line, newline, _ = data.partition(b"\n")
    try:
        header = json.loads(line)
        version = header["isthmus_journal"]
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path}: not an isthmus journal (its first line is not a journal header)") from error
    if version != VERSION:
        raise JournalError(f"{path}: journal version {version}; this isthmus reads version {VERSION}")
    return header, _records(data, len(line) + len(newline))


def _records(data: bytes, at: int) -> Iterator[tuple[Code, int, list[Int32]]]:
    while at + _RECORD.size <= len(data):
        code, index, count = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        arrays: list[Int32] = []
        for _ in range(count):
            if at + _LENGTH.size > len(data):
                return
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if at + 4 * length > len(data):
                return
            arrays.append(np.frombuffer(data, "<i4", length, at).astype(np.int32))
            at += 4 * length
        if code not in set(Code):
            raise JournalError(
                f"record of unknown kind {code} at byte {at}: the file is damaged or from a newer isthmus"
            )
        yield Code(code), index, arrays
