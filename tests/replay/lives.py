"""Journals for the tests of what replays and draws them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from isthmus.memory import Journal, Plan, Pool, Replay
from isthmus.memory.replay import Event
from isthmus.replay.timeline import Timeline
from tests.memory.helpers import Traffic, groups_of

SIZES = {"state": 15, "window": 3, "full": 2}


def write_life(path: Path, steps: int = 60, cells: int = 300, *, seed: int = 5) -> Pool:
    """A few requests come and go: granted, refused, moved, compacted; every page has an owner."""
    with Journal(path, about={"model": "tiny", "device": "cpu"}) as journal:
        pool = Pool(cells * 16, groups_of(SIZES), journal=journal)
        traffic = Traffic(pool, seed)
        for step in range(steps):
            plan = pool.plan(traffic.demand(cells // 20))
            if isinstance(plan, Plan):
                _bind(pool, plan, traffic)
                owner = journal.name(f"request-{step}")
                for space, ids in plan.ids.items():
                    journal.own(space, ids, np.full(len(ids), owner))
            else:
                pool.refused(plan)
            traffic.unbind(0.2)
            traffic.release(0.25)
            if step % 20 == 19:
                pool.compact()
            pool.take_delta()
    return pool


def _bind(pool: Pool, plan: Plan, traffic: Traffic) -> None:
    ids = plan.ids["tokens"]
    pool.commit(plan, {"window": traffic.rng.permutation(np.asarray(ids))[: plan.demand["window"]]})


def timeline_of(path: Path, **limits: int) -> Timeline:
    """The whole journal in frames."""
    life = Replay(path)
    timeline = Timeline(life, **limits)
    last: Event | None = None
    for last in life:
        timeline.note(last)
    timeline.finish(last)
    return timeline
