"""The frames of a timeline are the pool's own states, however many steps are merged into one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.memory import Replay
from isthmus.memory.records import Code
from isthmus.replay.timeline import MOST_CHANGES, MOST_FRAMES
from tests.replay.lives import timeline_of, write_life


def truth(path: Path) -> dict[int, tuple[dict[str, np.ndarray], dict[str, tuple[int, int]], list[list[str]]]]:
    """By step: owners of all pages, spans, and whose they are, read off the replayed pool itself."""
    life, found = Replay(path), {}
    due = False
    for event in life:
        due = due or event.code is Code.STEP
        if due and life.settled:
            due = False
            owner = {name: region.owner.copy() for name, region in life.pool.regions.items()}
            names = [[life.owners.name_of(life.pool.groups[name].space, int(v)) for v in owner[name]] for name in owner]
            found[life.step] = (owner, {n: (r.lo, r.hi) for n, r in life.pool.regions.items()}, names)
    return found


@pytest.mark.parametrize("most_frames", [MOST_FRAMES, 20, 4])
def test_every_frame_is_the_pool_behind_its_step(tmp_path: Path, most_frames: int) -> None:
    write_life(tmp_path / "a.journal")
    timeline, pool_at = timeline_of(tmp_path / "a.journal", most_frames=most_frames), truth(tmp_path / "a.journal")
    assert len(timeline.frames) <= most_frames
    seen = 0
    for frame, states in timeline.states():
        if not frame.step:
            continue
        owner, spans, names = pool_at[frame.step]
        for name, state, span, live, named in zip(timeline.groups, states, frame.spans, frame.live, names, strict=True):
            assert state[1].tolist() == owner[name].tolist()
            assert state[0].tolist() == (owner[name] > 0).tolist()
            assert spans[name] == span
            assert live == np.count_nonzero(owner[name])
            for page in np.flatnonzero(owner[name]).tolist():
                assert f"request {timeline.names[int(state[2, page])]}" == named[page]
        seen += 1
    assert seen == len(timeline.frames) - 1
    assert timeline.frames[-1].step == 60


def test_since_when_a_page_belongs_to_its_id(tmp_path: Path) -> None:
    """Moves do not make it younger: pages of a request are as old as the request."""
    write_life(tmp_path / "a.journal")
    timeline, moves = timeline_of(tmp_path / "a.journal"), 0
    for frame, states in timeline.states():
        moves += sum(frame.moved)
        for state in states:
            live = state[0] > 0
            assert (state[3, live] <= frame.step).all()
            asked = np.array([int(timeline.names[number].removeprefix("request-")) + 1 for number in state[2, live]])
            assert (state[3, live] == asked).all()
    assert moves


@pytest.mark.parametrize("limits", [{"most_frames": 6}, {"most_changes": 200}])
def test_merging_loses_no_move_and_no_refusal(tmp_path: Path, limits: dict[str, int]) -> None:
    pool = write_life(tmp_path / "a.journal")
    whole, small = timeline_of(tmp_path / "a.journal"), timeline_of(tmp_path / "a.journal", **limits)
    assert len(small.frames) < len(whole.frames)
    assert sum(len(rows) for frame in whole.frames for rows in frame.changes) < MOST_CHANGES
    for timeline in (whole, small):
        assert sum(frame.refusals for frame in timeline.frames) == pool.refusals
        moved = np.sum([frame.moved for frame in timeline.frames], axis=0).tolist()
        assert moved == list(pool.moved_pages.values())
    last = [list(timeline.states())[-1][1] for timeline in (whole, small)]
    assert all((a == b).all() for a, b in zip(*last, strict=True))


def test_a_large_arena_is_shown_in_cells_of_several_pages(tmp_path: Path) -> None:
    write_life(tmp_path / "a.journal", cells=2000)
    fine, coarse = timeline_of(tmp_path / "a.journal"), timeline_of(tmp_path / "a.journal", most_cells=90)
    assert coarse.per_cell["full"] == -(-1000 // 30)
    for (frame, states), (other, pages) in zip(coarse.states(), fine.states(), strict=True):
        assert frame.step == other.step
        for name, state, exact in zip(coarse.groups, states, pages, strict=True):
            per = coarse.per_cell[name]
            live = np.add.reduceat(exact[0], np.arange(0, exact.shape[1], per))
            assert state[0].tolist() == live.tolist()
            first = [row[row > 0][:1].sum() for row in np.split(exact[1], np.arange(per, exact.shape[1], per))]
            assert state[1].tolist() == first
