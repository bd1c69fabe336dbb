"""A pool that was put together from a snapshot goes on exactly as the one it was taken of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.memory import Copies, Frees, Moves, Op, Pool, Writes
from isthmus.memory.records import Code, pack, unpack, wide
from isthmus.memory.snapshot import most_bytes, restore, state_of
from tests.memory.helpers import Traffic, groups_of

SHAPES: dict[str, dict[str, int]] = {
    "one end": {"full": 2},
    "two ends": {"state": 15, "full": 2},
    "one float": {"state": 15, "window": 3, "full": 2},
    "two floats": {"state1": 15, "state2": 7, "window1": 3, "window2": 5, "full": 2},
    "windows alone": {"window1": 3, "window2": 5},
}


def live_on(traffic: Traffic, steps: int) -> list[tuple[object, ...]]:
    """Random calls of every kind; what a device would have had to do, and what was refused."""
    told: list[tuple[object, ...]] = []
    for step in range(steps):
        told.append(("granted", traffic.allocate(12)))
        traffic.unbind(0.2)
        traffic.rebind()
        traffic.pin()
        traffic.release(0.25)
        if step % 7 == 6:
            traffic.pool.compact()
        told += map(plain, traffic.pool.take_delta().ops)
    return told


def plain(op: Op) -> tuple[object, ...]:
    arrays: Sequence[object] = (op.page,) if isinstance(op, Frees) else ()
    if isinstance(op, Moves | Copies):
        arrays = (op.source, op.destination)
    elif isinstance(op, Writes):
        arrays = (op.virtual, op.physical)
    return (type(op).__name__, op.group, *(np.asarray(array).tolist() for array in arrays))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    walls=st.booleans(),
    seed=st.integers(0, 2**31),
    before=st.integers(0, 25),
    cells=st.integers(120, 500),
)
def test_a_restored_pool_goes_on_as_the_original(shape: str, walls: bool, seed: int, before: int, cells: int) -> None:
    groups = groups_of(SHAPES[shape])
    share = (cells * 16 - max(g.spec.page_bytes for g in groups)) // len(groups)
    split = {g.name: share for g in groups} if walls else None
    first = Traffic(Pool(cells * 16, groups, walls=split), seed, pins=True)
    live_on(first, before)
    written = pack(Code.STATE, 0, state_of(first.pool))
    second = Traffic(Pool(cells * 16, groups, walls=split), seed, pins=True)
    restore(second.pool, unpack(written).arrays)
    second.pool.check()
    assert pack(Code.STATE, 0, state_of(second.pool)) == written
    assert len(written) <= most_bytes(first.pool)
    second.rng.bit_generator.state = first.rng.bit_generator.state
    second.pinned = list(first.pinned)
    assert live_on(second, 12) == live_on(first, 12)
    assert pack(Code.STATE, 0, state_of(second.pool)) == pack(Code.STATE, 0, state_of(first.pool))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=80), st.integers(-3, 3), st.integers(0, 200))
def test_arrays_come_back_as_they_were(values: list[int], step: int, run: int) -> None:
    """Whether written as they are or as runs; also where differences do not fit int32."""
    array = np.concatenate((np.array(values, np.int64), 5 + step * np.arange(run), np.array(values[:3], np.int64)))
    record = unpack(pack(Code.OWN, 7, [array, values]))
    assert (record.code, record.index) == (Code.OWN, 7)
    assert record.arrays[0].tolist() == array.tolist()
    assert record.arrays[1].tolist() == values


def test_runs_take_few_bytes() -> None:
    assert len(pack(Code.RELEASE, 0, [np.arange(100_000)])) < 40
    assert len(pack(Code.RELEASE, 0, [np.arange(100_000)[::-1]])) < 40


@pytest.mark.parametrize("damage", ["an array less", "an id less", "a page outside"])
def test_arrays_of_another_pool_are_refused(damage: str) -> None:
    pool = Pool(200 * 16, groups_of(SHAPES["one float"]))
    traffic = Traffic(pool, 1)
    traffic.grant({"state": 2, "full": 5, "window": 3})
    arrays = unpack(pack(Code.STATE, 0, state_of(pool))).arrays
    if damage == "an array less":
        arrays = arrays[:-1]
    elif damage == "an id less":
        arrays[2] = arrays[2][1:]
    else:
        arrays[-3] = arrays[-3] + 10_000
    with pytest.raises((ValueError, IndexError)):
        restore(Pool(200 * 16, groups_of(SHAPES["one float"])), arrays)


def test_wide_numbers() -> None:
    numbers = [0, 1, 2**31 - 1, 2**31, 2**60]
    assert max(wide(*numbers)) < 2**31
    record = unpack(pack(Code.STEP, 0, [wide(*numbers)]))
    assert [low + (high << 31) for low, high in record.arrays[0].reshape(-1, 2).tolist()] == numbers
