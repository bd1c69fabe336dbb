"""Execute a journal again, without a device: the same calls on a fresh pool, every outcome compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.group import Group
from isthmus.memory.ids import PhysicalPages
from isthmus.memory.journal import Code, IntLike, JournalError, outcome, read
from isthmus.memory.pool import Pool, Refusal
from isthmus.memory.spec import PageSpec

Int32 = NDArray[np.int32]


def replay(path: str | Path, each: Callable[[int, Code, Pool], None] | None = None) -> Pool:
    """Rebuild the pool a journal describes, bit for bit.

    `each(record number, what it was, pool)` is called after every record (to check, to draw).
    JournalError names the record at which the outcome differs from the recorded one.
    """
    header, records = read(path)
    try:
        pool = _pool(header)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path}: its header describes no pool: {error}") from error
    groups, spaces = list(pool.groups), sorted(pool.spaces)
    for number, (code, index, arrays) in enumerate(records):
        try:
            got = _execute(pool, code, index, arrays, groups, spaces)
        except (ValueError, IndexError, TypeError) as error:
            raise JournalError(f"{path}: record {number} ({code.name.lower()}) cannot be repeated: {error}") from error
        want = _recorded_outcome(code, arrays, len(groups))
        if len(got) != len(want) or not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
            raise JournalError(f"{path}: record {number} ({code.name.lower()}) has another outcome than recorded")
        pool.take_delta()
        if each is not None:
            each(number, code, pool)
    return pool


def _pool(header: dict[str, Any]) -> Pool:
    groups = [
        Group(g["name"], PageSpec(g["page_size"], g["page_bytes"], ()), g["kind"], g["window"])
        for g in header["groups"]
    ]
    return Pool(header["arena_bytes"], groups, walls=header["walls"])


def _recorded_outcome(code: Code, arrays: list[Int32], groups: int) -> list[Int32]:
    if code is Code.COMMIT:
        return arrays[1 + groups :]
    return arrays if code is Code.COMPACT else []


def _execute(
    pool: Pool, code: Code, index: int, arrays: list[Int32], groups: list[str], spaces: list[str]
) -> list[IntLike]:
    """Make the call a record stands for and return its outcome in the journal's form."""
    if code in (Code.COMMIT, Code.REFUSAL):
        plan = pool.plan(dict(zip(groups, arrays[0].tolist(), strict=True)))
        if isinstance(plan, Refusal) is not (code is Code.REFUSAL):
            raise ValueError("granted where it was refused, or refused where it was granted")
        if isinstance(plan, Refusal):
            pool.refused(plan)
            return []
        pool.commit(plan, dict(zip(groups, arrays[1 : 1 + len(groups)], strict=True)))
        return outcome(pool.take_delta().ops, groups)
    if code is Code.UNBIND:
        pool.unbind(groups[index], arrays[0])
    elif code is Code.RELEASE:
        pool.release(spaces[index], arrays[0])
    elif code is Code.COPY:
        pool.copy(groups[index], arrays[0], arrays[1])
    elif code is Code.REBIND:
        pool.rebind(groups[index], arrays[0], arrays[1])
    elif code is Code.PIN:
        pool.pin(groups[index], arrays[0])
    elif code is Code.UNPIN:
        pool.unpin(groups[index], arrays[0].view(PhysicalPages))
    else:
        pool.compact()
        return outcome(pool.take_delta().ops, groups)
    return []
