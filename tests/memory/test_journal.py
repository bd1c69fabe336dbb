"""A journal rebuilds the pool bit for bit, says where it differs, is good up to where it was cut, and stays bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.memory import DivergenceError, Journal, JournalError, Op, Pool, Replay, replay
from isthmus.memory.journal import least_bytes
from isthmus.memory.records import Code, IntLike, outcome
from isthmus.memory.region import Region
from isthmus.memory.ring import BLOCK, KEPT, Ring
from tests.memory.helpers import Traffic, groups_of
from tests.memory.test_doors import same, state_of

SIZES = {"state": 15, "window": 3, "full": 2}
STEPS = 60


def journalled(journal: Journal | None) -> Pool:
    return Pool(300 * 16, groups_of(SIZES), journal=journal)


def least() -> int:
    """Bytes of the smallest ring for these pools."""
    return least_bytes(journalled(None))


def drive(pool: Pool, steps: int, seed: int = 5) -> Traffic:
    """Traffic with every kind of call; a step ends with a delta."""
    traffic = Traffic(pool, seed, pins=True)
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
        pool.take_delta()
    return traffic


def lived(path: Path | None, steps: int = STEPS, ring_bytes: int | None = None) -> Pool:
    """A pool after some traffic, journalled if a path is given."""
    journal = Journal(path, ring_bytes) if path is not None else None
    pool = journalled(journal)
    traffic = drive(pool, steps)
    assert traffic.refused
    assert sum(pool.moved_pages.values())
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
        "COMMIT", "REFUSAL", "UNBIND", "RELEASE", "COPY", "PIN", "UNPIN", "COMPACT", "REBIND", "STEP", "STATE",
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


def test_steps_have_numbers_and_times(tmp_path: Path) -> None:
    now = iter(np.arange(0, 1000, 0.5).tolist())
    with Journal(tmp_path / "a.journal", clock=lambda: next(now)) as journal:
        drive(journalled(journal), 7)
    events = list(Replay(tmp_path / "a.journal"))
    assert [(e.step, e.seconds) for e in events if e.code is Code.STEP] == [(i, i / 2) for i in range(1, 8)]
    assert {e.step for e in events if e.code is Code.RELEASE} == set(range(1, 8))


# -- a ring ------------------------------------------------------------------------------------------------------------


def test_a_full_ring_drops_the_oldest_and_replays_the_rest(tmp_path: Path) -> None:
    """Many times round a ring that holds a few dozen steps."""
    path = tmp_path / "a.journal"
    pool = lived(path, 3000, least())
    assert path.stat().st_size <= least() + BLOCK
    life = Replay(path)
    steps = [event.step for event in life if event.code is Code.STEP]
    assert steps == list(range(steps[0], 3001))
    assert life.first > 0
    assert steps[0] > 1
    assert life.segments > 1
    assert len(steps) > 20
    assert same(state_of(life.pool), state_of(pool))


def test_at_any_moment_the_file_replays_to_where_the_pool_is(tmp_path: Path) -> None:
    """As it would be found after a kill, round the ring and right behind each start of a segment."""
    path = tmp_path / "a.journal"
    pool = journalled(Journal(path, least()))
    for moment in range(30):
        drive(pool, 1 + moment % 7, seed=moment)
        for name, region in pool.regions.items():
            for page in list(region.pins):
                pool.unpin(name, pool.table(name).translate(region.owner[[page]]))
        pool.take_delta()
        assert same(state_of(replay(path)), state_of(pool))


def test_a_process_that_is_killed_leaves_all_it_did(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.memory.test_journal import *\n"
        "pool = journalled(Journal(Path(sys.argv[1]))); drive(pool, 60); pool.release('tokens', pool.ids('tokens')"
        ".live_ids()[:0]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "a.journal"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert same(state_of(replay(path)), state_of(lived(None)))


def test_a_torn_record_ends_the_journal_before_it(tmp_path: Path) -> None:
    whole = Replay(_closed(tmp_path / "a.journal"))
    data = (tmp_path / "a.journal").read_bytes()
    count = sum(1 for _ in whole)
    torn = {1: count - 1, 100: None, len(data) // 2: None}
    for cut, left in torn.items():
        (tmp_path / "cut").write_bytes(data[:-cut])
        records = sum(1 for _ in Replay(tmp_path / "cut"))
        assert 1 <= records < count
        assert left is None or records == left
        (tmp_path / "flipped").write_bytes(data[:-cut] + bytes([data[-cut] ^ 1]) + data[len(data) - cut + 1 :])
        assert sum(1 for _ in Replay(tmp_path / "flipped")) == records


def test_a_segment_whose_start_was_not_finished_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed while it writes the state that a segment starts with."""
    path, begun = tmp_path / "a.journal", 0
    pool = journalled(Journal(path, least()))
    append, begin = Ring.append, Ring.begin

    def killed(ring: Ring, data: bytes) -> None:
        append(ring, data)
        raise KeyboardInterrupt

    def begin_and_be_killed(ring: Ring, first: int, frames: Sequence[bytes]) -> None:
        nonlocal begun
        begun = first
        monkeypatch.setattr(Ring, "append", killed)
        begin(ring, first, frames)

    monkeypatch.setattr(Ring, "begin", begin_and_be_killed)
    with pytest.raises(KeyboardInterrupt):
        drive(pool, 1000)
    assert [event.number for event in Replay(path)] == list(range(begun))


def test_a_change_too_large_for_the_ring_starts_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fits, count = tmp_path / "a.journal", Ring.fits, 0

    def once(ring: Ring, length: int) -> bool:
        nonlocal count
        count += 1
        return count != 50 and fits(ring, length)

    monkeypatch.setattr(Ring, "fits", once)
    pool = lived(path)
    life = Replay(path)
    assert life.first == 51  # the state of the start, 49 records, and the one that did not fit
    assert same(state_of(replay(path)), state_of(pool))


def test_a_ring_too_small_for_the_pool_is_refused_with_the_least(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=f"needs a journal of {least():,} bytes"):
        journalled(Journal(tmp_path / "a.journal", least() - BLOCK))


def test_bytes_never_used_are_given_back(tmp_path: Path) -> None:
    path = _closed(tmp_path / "a.journal")
    assert path.stat().st_size < 200_000


# -- whose file --------------------------------------------------------------------------------------------------------


def test_earlier_journals_are_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    pools = [lived(path, 20 + i) for i in range(3)]
    for name, pool in zip(("a.journal.2", "a.journal.1", "a.journal"), pools, strict=True):
        assert same(state_of(replay(tmp_path / name)), state_of(pool))
    for _ in range(KEPT):
        Journal(path).close()  # nothing in it: the next takes its place
    assert len(list(tmp_path.iterdir())) == 4
    for _ in range(KEPT + 2):
        _closed(path)
    assert sorted(p.name for p in tmp_path.iterdir())[1:] == [f"a.journal.{i}" for i in range(1, KEPT + 1)]


def test_two_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    pool = journalled(Journal(path))
    drive(pool, 5)
    with pytest.raises(JournalError, match="another process is writing"):
        Journal(path)
    drive(pool, 5)
    assert same(state_of(replay(path)), state_of(pool))


def test_a_file_that_is_no_journal_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(JournalError, match=r"model\.gguf: this file is there and is no journal"):
        Journal(tmp_path / "model.gguf")
    assert os.listdir(tmp_path) == ["model.gguf"]
    with pytest.raises(JournalError, match="no such file"):
        Journal(tmp_path / "none" / "a.journal")


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


# -- where it differs --------------------------------------------------------------------------------------------------


def test_another_page_is_named_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pages that lie elsewhere: which record, step, group, id and request, what was due and what came."""
    path = tmp_path / "a.journal"
    with Journal(path) as journal:
        pool = Pool(300 * 16, groups_of({"full": 2}), journal=journal)
        for name in ("a", "b"):
            plan = pool.plan({"full": 5})
            pool.commit(plan)
            journal.own("tokens", plan.ids["tokens"], [journal.name(name)] * 5)  # type: ignore[union-attr]
            pool.take_delta()
        pool.release("tokens", [6, 7])
        pool.commit(pool.plan({"full": 1}))
    take = Region.take

    def highest(region: Region, n: int, lo: int, hi: int) -> Any:
        return take(region, n, lo, hi) if n > 1 else region.holes.highest(1)

    monkeypatch.setattr(Region, "take", highest)
    with pytest.raises(DivergenceError) as caught:
        replay(path)
    assert "(commit), step 3: pages of 'full', id 11 of an unknown owner (entry 0): recorded 6, here 7" in str(
        caught.value
    )
    assert caught.value.event.code is Code.COMMIT


LIES: dict[str, tuple[Code, int, str]] = {
    "another page": (Code.COMMIT, -1, r"pages of 'full', id \d+ of an unknown owner \(entry \d+\): recorded"),
    "another id": (Code.COMMIT, 2, r"fresh ids of 'tokens', id \d+ of .*: recorded"),
    "a demand that is refused": (Code.COMMIT, 0, r"pages: recorded granted, here refused"),
    "an id that is not one": (Code.RELEASE, 0, "cannot be repeated: .* is not a virtual page id"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_recorded_lie_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """One entry of one array of one record, in the middle of a life, was not so."""
    code, array, message = LIES[lie]
    record, told = Journal._record, 0

    def lying(journal: Journal, this: Code, index: int, *arrays: IntLike) -> None:
        nonlocal told
        changed = [np.array(one) for one in arrays]
        if this is code and journal.records > 60 and not told and len(changed[array]):
            told = journal.records
            changed[array][-1] += 1000
        record(journal, this, index, *changed)

    monkeypatch.setattr(Journal, "_record", lying)
    lived(tmp_path / "a.journal")
    with pytest.raises(DivergenceError, match=message) as caught:
        replay(tmp_path / "a.journal")
    assert caught.value.event.number == told


def test_a_wrong_snapshot_is_found(tmp_path: Path) -> None:
    """Something changed the pool past its doors: the state that the next segment starts with does not follow."""
    path = tmp_path / "a.journal"
    with Journal(path, least()) as journal:
        pool = journalled(journal)
        drive(pool, 5)
        pool.moved_pages["full"] += 1
        drive(pool, 60)
    with pytest.raises(DivergenceError, match="the state that the next segment starts with is another"):
        replay(path)


# -- owners ------------------------------------------------------------------------------------------------------------


def test_owners_outlive_the_records_that_told_of_them(tmp_path: Path) -> None:
    """Round the ring: who owns an id, and who has ended, is still known."""
    path = tmp_path / "a.journal"
    with Journal(path, least()) as journal:
        pool = journalled(journal)
        plan = pool.plan({"full": 6, "state": 1})
        pool.commit(plan)
        old, young = journal.name("ö" * 200), journal.name("young")
        journal.own("tokens", [1, 2, 3, 4], [old, old, young, young])
        pool.copy("state", *_two_states(pool))
        journal.left([old])
        pool.release("tokens", [4])
        for _ in range(3000):
            pool.commit(pool.plan({"full": 9}))
            pool.release("tokens", pool.ids("tokens").live_ids()[-9:])
            pool.take_delta()
    life = Replay(path)
    for _ in life:
        pass
    assert life.first > 0
    assert life.owners.name_of("tokens", 2) == f"request {'ö' * 80} (runs no more)"
    assert life.owners.name_of("tokens", 3) == "request young"
    assert life.owners.name_of("tokens", 4) == "an unknown owner"


def _two_states(pool: Pool) -> tuple[Any, Any]:
    plan = pool.plan({"state": 1})
    pool.commit(plan)
    return pool.ids("states").live_ids()[:1], pool.ids("states").live_ids()[1:]


def _closed(path: Path) -> Path:
    lived(path)
    return path


def test_outcomes_tell_moves_and_pages() -> None:
    pool = journalled(None)
    pool.commit(pool.plan({"full": 4}))
    ops: Sequence[Op] = pool.take_delta().ops
    kinds, pages = outcome(ops, list(pool.groups))
    assert list(kinds) == [2 * list(pool.groups).index("full") + 1]
    assert np.asarray(pages).tolist() == pool.table("full").translate([1, 2, 3, 4]).tolist()
