"""A file of bounded size that keeps the newest of what is appended, whole segments at a time.

    header line (JSON), padded to a block | segment | segment | ...         segments go round and round
    segment    starts at a block: <magic> <number> <number of its first record> <crc>, then frames
    frame      <crc u32> <length u32> <bytes>; an empty frame ends a segment that has a successor

The file is mapped into memory: what was appended is the operating system's at once, so a process that is killed
loses nothing but the frame it was writing. A frame's checksum is seeded by its segment's, so neither half a frame nor
what an older segment left behind it is ever taken for one. A segment's head is written after the frames that it
starts with: to a reader they are all there, or the segment is not. When the power fails, what the system had not
written yet is lost too; a reader then finds fewer frames.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from isthmus.memory.records import JournalError

BLOCK = 4096
KEPT = 9
"""How many earlier files stay beside a new one, as FILE.1 (the newest) to FILE.9."""

_MAGIC = b"\nsegment"
_HEAD = struct.Struct("<8sQQI")
_FRAME = struct.Struct("<II")
_WRAP = 0xFFFFFFFF  # as a length: the segment goes on at the start of the ring
_KEY = "isthmus_journal"


@dataclass(frozen=True)
class Segment:
    """One segment as it is read."""

    number: int
    first: int  # number of its first record, counted from the start of the life
    frames: list[memoryview]
    ended: bool  # it has a successor


class Ring:
    """Writes one file. `used` counts the bytes of the newest segment."""

    def __init__(self, file: BinaryIO, header: Mapping[str, Any], size: int) -> None:
        """`size` bytes of segments after the header. OSError if the disk has no room for them."""
        line = _header_line(header, size)
        self._start = _blocks(len(line))
        self._end = self._start + size
        self._file = file
        os.posix_fallocate(file.fileno(), 0, self._end)  # a full disk is found now and not in the middle of a step
        self._map = mmap.mmap(file.fileno(), self._end)
        self._map[: len(line)] = line
        self._at = self._high = self._start
        self._number = self._seed = 0
        self.used = 0

    def fits(self, length: int) -> bool:
        """Can the newest segment take so many bytes more without running into its own head?"""
        need = _FRAME.size + length
        waste = self._end - self._at if self._at + need > self._end else 0
        return self.used + waste + need + 2 * _FRAME.size <= self._end - self._start  # an end, wrapped, comes after it

    def append(self, data: bytes) -> None:
        """Add a frame to the newest segment; the oldest give way."""
        need = _FRAME.size + len(data)
        if self._at + need > self._end:
            self._wrap()
        at = self._at
        self._map[at : at + need] = _FRAME.pack(zlib.crc32(data, self._seed), len(data)) + data
        self._at += need
        self.used += need

    def begin(self, first: int, frames: Sequence[bytes]) -> None:
        """Start a segment with these frames. The one before it counts as cut short unless `end` was called."""
        self._at = _blocks(self._at)
        if self._at + BLOCK > self._end:
            self._turn()
        at, self._number = self._at, self._number + 1
        head = _HEAD.pack(_MAGIC, self._number, first, 0)[:-4]
        self._seed = zlib.crc32(head)
        self._map[at : at + _HEAD.size] = bytes(_HEAD.size)
        self._at, self.used = at + _HEAD.size, _HEAD.size
        for frame in frames:
            self.append(frame)
        self._map[at : at + _HEAD.size] = head + struct.pack("<I", self._seed)

    def end(self) -> None:
        """The newest segment is complete: the next one goes on where it ends."""
        self.append(b"")

    def close(self) -> None:
        """Give back the bytes that were never used."""
        if self._map.closed:
            return
        high = max(self._high, self._at)
        self._map.close()
        self._file.truncate(high)
        self._file.close()

    def _wrap(self) -> None:
        room = self._end - self._at
        if room >= _FRAME.size:
            self._map[self._at : self._at + _FRAME.size] = _FRAME.pack(zlib.crc32(b"", self._seed), _WRAP)
        self.used += room
        self._turn()

    def _turn(self) -> None:
        self._high, self._at = self._end, self._start


def claim(path: Path) -> tuple[BinaryIO, Path | None]:
    """The file, empty and locked for this process, and where the journal went that was there before (`FILE.1`).

    JournalError if it cannot be had: somebody else writes it, or it is no journal.
    """
    moved = None
    while True:
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        except OSError as error:
            raise JournalError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise JournalError(f"{path}: another process is writing this journal: name another file") from None
        if not os.fstat(file.fileno()).st_size:
            return file, moved
        with file:
            if not file.read(64).startswith(b'{"%s"' % _KEY.encode()):
                raise JournalError(f"{path}: this file is there and is no journal: name another one")
            moved = _put_aside(path)


def read(path: Path, version: int) -> tuple[dict[str, Any], list[Segment]]:
    """The header, and the newest segments that follow on each other without a gap, oldest first; maybe none.

    JournalError if the file is not a journal of this version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    line = data.partition(b"\n")[0]
    try:
        header = json.loads(line)
        found = header[_KEY]
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path}: not an isthmus journal (its first line is not a journal header)") from error
    if found != version:
        raise JournalError(f"{path}: journal version {found}; this isthmus reads version {version}")
    try:
        start = _blocks(len(line) + 1)
        end = start + int(header["ring_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path}: its header does not say how large it is: {error!r}") from error
    return header, _chain(memoryview(data), start, end)


def _chain(data: memoryview, start: int, end: int) -> list[Segment]:
    heads: dict[int, tuple[int, int, int]] = {}
    for at in range(start, min(end, len(data)) - _HEAD.size, BLOCK):
        magic, number, first, crc = _HEAD.unpack_from(data, at)
        if magic == _MAGIC and crc == zlib.crc32(data[at : at + _HEAD.size - 4]):
            heads[number] = (at + _HEAD.size, first, crc)
    segments: list[Segment] = []
    number = max(heads, default=0)
    while number in heads:
        at, first, seed = heads[number]
        *frames, last = _frames(data, at, start, end, seed)
        segment = Segment(number, first, [frame for frame in frames if frame is not None], last is not None)
        if segments and not segment.ended:
            break
        segments.append(segment)
        number -= 1
    return segments[::-1]


def _frames(data: memoryview, at: int, start: int, end: int, seed: int) -> Iterator[memoryview | None]:
    """The whole frames from there on; at last an empty one if the segment says that it ends, None if it just stops."""
    turned = False
    while True:
        crc, length = _FRAME.unpack_from(data, at) if at + _FRAME.size <= min(end, len(data)) else (0, _WRAP)
        if length == _WRAP and not turned and (at + _FRAME.size > end or crc == zlib.crc32(b"", seed)):
            at, turned = start, True
            continue
        frame = data[at + _FRAME.size : at + _FRAME.size + length]
        if length == _WRAP or len(frame) < length or zlib.crc32(frame, seed) != crc:
            yield None
            return
        yield frame
        if not length:
            return
        at += _FRAME.size + length


def _header_line(header: Mapping[str, Any], size: int) -> bytes:
    assert next(iter(header)) == _KEY, "the first key tells what the file is"
    return json.dumps({**header, "ring_bytes": size}).encode() + b"\n"


def _put_aside(path: Path) -> Path:
    """FILE becomes FILE.1, that one FILE.2, and so on; the ninth makes room."""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, KEPT + 1))]
    taken = next((i for i, name in enumerate(names) if not name.exists()), KEPT)
    for i in range(taken, 0, -1):
        names[i - 1].replace(names[i])
    return names[1]


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
