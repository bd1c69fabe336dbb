"""A journal rebuilds the pool bit for bit, says where it differs, and is good up to where it was cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.memory import Journal, JournalError, Pool, replay
from isthmus.memory.journal import Code
from tests.memory.helpers import Traffic, groups_of
from tests.memory.test_doors import same, state_of

SIZES = {"state": 15, "window": 3, "full": 2}


def lived(path: Path | None, steps: int = 60) -> Pool:
    """A pool after some traffic with every kind of call, journalled if a path is given."""
    journal = Journal(path) if path is not None else None
    pool = Pool(300 * 16, groups_of(SIZES), journal=journal)
    traffic = Traffic(pool, 5, pins=True)
    for step in range(steps):
        traffic.allocate(14)
        traffic.unbind(0.2)
        traffic.release(0.2)
        traffic.pin()
        traffic.rebind()
        states = pool.ids("states").live_ids()
        if len(states) > 1:
            pool.copy("state", states[:1], states[1:2])
        if step % 20 == 19:
            pool.compact()
    assert traffic.refused
    assert sum(pool.moved_pages.values())
    pool.take_delta()
    if journal is not None:
        journal.close()
    return pool


def test_replay_rebuilds_the_same_state(tmp_path: Path) -> None:
    pool = lived(tmp_path / "a.journal")
    checked: list[Code] = []

    def each(_: int, code: Code, again: Pool) -> None:
        checked.append(code)
        again.check()

    again = replay(tmp_path / "a.journal", each=each)
    assert same(state_of(again), state_of(pool))
    assert again.refusals == pool.refusals
    assert {code.name for code in checked} == {
        "COMMIT", "REFUSAL", "UNBIND", "RELEASE", "COPY", "PIN", "UNPIN", "COMPACT", "REBIND",
    }  # fmt: skip


def test_the_journal_changes_nothing(tmp_path: Path) -> None:
    assert same(state_of(lived(tmp_path / "a.journal")), state_of(lived(None)))


def test_static_walls_are_replayed(tmp_path: Path) -> None:
    with Journal(tmp_path / "w.journal") as journal:
        pool = Pool(
            300 * 16, groups_of({"full": 2, "window": 3}), walls={"full": 1600, "window": 1600}, journal=journal
        )
        Traffic(pool, 1).allocate(20)
    pool.take_delta()
    assert same(state_of(replay(tmp_path / "w.journal")), state_of(pool))
    assert replay(tmp_path / "w.journal").walls == pool.walls


def test_a_cut_journal_is_good_up_to_the_cut(tmp_path: Path) -> None:
    lived(tmp_path / "a.journal")
    data = (tmp_path / "a.journal").read_bytes()
    numbers: list[int] = []
    (tmp_path / "cut.journal").write_bytes(data[: len(data) // 2 + 1])
    replay(tmp_path / "cut.journal", each=lambda number, code, p: numbers.append(number)).check()
    assert len(numbers) > 20


def test_another_outcome_is_reported_with_its_record(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.journal") as journal:
        pool = Pool(300 * 16, groups_of({"full": 2}), journal=journal)
        pool.commit(pool.plan({"full": 5}))
    data = bytearray((tmp_path / "a.journal").read_bytes())
    data[-4:] = np.array([77], "<i4").tobytes()  # the last physical page granted
    (tmp_path / "a.journal").write_bytes(bytes(data))
    with pytest.raises(JournalError, match=r"record 0 \(commit\) has another outcome"):
        replay(tmp_path / "a.journal")


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}\n", b"[1]\n", b'{"isthmus_journal": 99}\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(JournalError, match=r"x: (not an isthmus journal|journal version 99)"):
        replay(tmp_path / "x")


def test_one_journal_belongs_to_one_pool(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.journal") as journal:
        Pool(300 * 16, groups_of({"full": 2}), journal=journal)
        with pytest.raises(ValueError, match="one per pool"):
            Pool(300 * 16, groups_of({"full": 2}), journal=journal)
