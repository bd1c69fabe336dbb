"""What a journal's records say, and their bytes.

    record    <code u8> <group or space u8> <arrays u16>  <length u32> per array  <int32 ...>
    length    entries that follow; with the top bit set they are runs: first, differences, how often each of them

Ids and pages come in runs more often than not, so long arrays mostly take a few bytes (`_runs`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.delta import Moves, Op, Writes

Int32 = NDArray[np.int32]
IntLike = NDArray[np.integer] | Sequence[int]

_HEAD = struct.Struct("<BBH")
_LITTLE = np.dtype("<i4")
_RUNS = 1 << 31
_LONG = 24  # entries from which an array may be worth writing as runs
_HALF = 31  # bits


class JournalError(ValueError):
    """A file that is no journal, cannot be written as one, or whose recorded outcome differs from the replay's."""


class Code(enum.IntEnum):
    """What a record says. The arrays of each are listed beside it."""

    COMMIT = 1  # demand per group; fresh ids per space; ids per group that does not cover its space; `outcome`
    REFUSAL = 2  # demand per group
    UNBIND = 3  # ids
    RELEASE = 4  # ids (the index names the space)
    COPY = 5  # source ids, destination ids
    PIN = 6  # ids
    UNPIN = 7  # physical pages
    COMPACT = 8  # `outcome`
    REBIND = 9  # source ids, target ids
    STEP = 10  # [step, microseconds since the start], `wide`: what came before it since the last is this step's
    NAME = 11  # [number], UTF-8 bytes: somebody who owns pages
    OWN = 12  # ids, numbers of their owners (the index names the space)
    LEFT = 13  # numbers of owners that do not run any more
    STATE = 14  # the last STEP's array, then `snapshot.state_of`: where a segment starts


@dataclass(frozen=True)
class Record:
    """One record as it is read."""

    code: Code
    index: int
    arrays: list[Int32]


def pack(code: Code, index: int, arrays: Sequence[IntLike]) -> bytes:
    """The bytes of a record. Values are int32."""
    lengths, parts = [], [b"", b""]
    for array in arrays:
        n = len(array)
        if not isinstance(array, np.ndarray):  # a few plain numbers: faster than by way of an array
            parts.append(struct.pack(f"<{n}i", *array))
        else:
            entries = array.astype(_LITTLE, copy=False)
            if n >= _LONG and (runs := _runs(entries)) is not None:
                entries, n = runs, len(runs) | _RUNS
            parts.append(entries.tobytes())
        lengths.append(n)
    parts[0], parts[1] = _HEAD.pack(code, index, len(lengths)), struct.pack(f"<{len(lengths)}I", *lengths)
    return b"".join(parts)


def unpack(data: bytes | memoryview) -> Record:
    """The record of these bytes. JournalError for a code that this version does not know."""
    code, index, count = _HEAD.unpack_from(data)
    if code not in set(Code):
        raise JournalError(f"a record of unknown kind {code}: the file is damaged or from a newer isthmus")
    at, arrays = _HEAD.size + 4 * count, []
    for length in struct.unpack_from(f"<{count}I", data, _HEAD.size):
        entries = np.frombuffer(data, _LITTLE, length & ~_RUNS, at)
        arrays.append(_entries(entries) if length & _RUNS else entries.astype(np.int32))
        at += 4 * len(entries)
    return Record(Code(code), index, arrays)


def outcome(ops: Sequence[Op], groups: Sequence[str]) -> list[IntLike]:
    """What a plan or a compaction did: `[2 g moves | 2 g + 1 pages given, ...]` by group index g, then their pages.

    Moves are two arrays (source, destination). Table writes are told by the pages given: moved ids are those of the
    source pages, bound ids stand in the record.
    """
    kinds: list[int] = []
    arrays: list[IntLike] = []
    moved = False
    for op in ops:
        if isinstance(op, Moves):
            kinds.append(2 * groups.index(op.group))
            arrays += [op.source, op.destination]
        elif isinstance(op, Writes) and not moved:
            kinds.append(2 * groups.index(op.group) + 1)
            arrays.append(op.physical)
        moved = isinstance(op, Moves)  # the write that follows it is its own
    return [kinds, *arrays]


def wide(*values: int) -> list[int]:
    """Numbers below 2**62 as pairs of int32."""
    return [half for value in values for half in (value & (1 << _HALF) - 1, value >> _HALF)]


def narrow(halves: Int32) -> list[int]:
    """The numbers that `wide` took apart."""
    return [low | high << _HALF for low, high in halves.reshape(-1, 2).tolist()]


def _runs(entries: Int32) -> Int32 | None:
    """`[first, differences, counts]`, None where that is no shorter. Wraps around like int32 does."""
    steps = np.diff(entries)
    last = np.append(np.flatnonzero(steps[1:] != steps[:-1]), len(steps) - 1)
    if 1 + 2 * len(last) >= len(entries):
        return None
    return np.concatenate((entries[:1], steps[last], np.diff(last, prepend=-1)), dtype=_LITTLE, casting="unsafe")


def _entries(runs: Int32) -> Int32:
    half = len(runs) // 2
    steps = np.concatenate((runs[:1], np.repeat(runs[1 : 1 + half], runs[1 + half :])))
    return np.cumsum(steps, dtype=np.int32)
