"""Unified memory against walls, where the answer is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from isthmus.engine.config import SchedulerConfig
from isthmus.sim.arrivals import Arrival
from isthmus.sim.compare import Comparison
from isthmus.sim.machine import Machine
from isthmus.sim.shape import read_model
from isthmus.sim.simulation import Setup
from isthmus.sim.split import search, trials
from isthmus.sim.summary import Limits, summary
from isthmus.sim.workload import Workload
from tests.sim.conftest import STATES, write

CLOCKWORK = Machine("clockwork", "one second a step", 1.0, 0.0, float("inf"), float("inf"))


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """States of 1 MiB and 1 KiB a token; a second a step, so that only the number of steps counts."""
    model = read_model(write(tmp_path, STATES | {"shape": {"layers": 1, "dense_bytes": 0, "token_flops": 0}}))
    return Setup(model, CLOCKWORK, 17 << 20, SchedulerConfig(16, 16_384), prefix_caching=False)


def long(at: float) -> Arrival:
    return Arrival(at, 10_000, 40)  # 10 MiB of pages and a state


def test_walls_are_as_the_traffic_needs_them(setup: Setup) -> None:
    """Short requests take states alone: the more of the arena they have, the sooner all are done."""
    short = [Arrival(0.0, 16, 10) for _ in range(45)]
    best, *rest = search(setup, short, Limits(), lambda n: None)
    assert best.walls["state"] / setup.arena_bytes > 0.85
    assert best.rank >= max(trial.rank for trial in rest)
    assert len(rest) < trials(2)


def test_one_arena_serves_what_no_walls_serve_together(setup: Setup) -> None:
    """Turns of many short requests and of long ones: walls fit one or the other, one arena both."""
    short = tuple(Arrival(i / 10, 16, 30) for i in range(45))
    longs = tuple(dataclasses.replace(long(2.0 * i), trace=1) for i in range(5))
    workload = Workload(("short", "long"), (short, longs), 100)
    comparison = Comparison(setup, workload, Limits(ttft=170), sample=50, finalists=1)
    comparison.unified(lambda n: None)
    comparison.phases(lambda n: None)
    comparison.best(lambda n: None)
    sides = {name: summary(outcome, comparison.limits) for name, outcome in comparison.outcomes.items()}
    assert set(sides) == {"unified", "static best", "for short", "for long"}
    assert sides["unified"]["good"] == 50
    assert sides["static best"]["goodput_per_second"] >= max(
        side["goodput_per_second"] for name, side in sides.items() if name.startswith("for")
    )
    assert all(side["good"] < 50 for name, side in sides.items() if name != "unified")
    assert sides["for short"]["refused"] == 5, "no wall of that split holds a long one"
    assert sides["unified"]["seconds"] <= min(side["seconds"] for side in sides.values() if not side["refused"])


def test_a_given_split_is_taken_as_it_is(setup: Setup) -> None:
    workload = Workload(("x",), ((long(0.0),),))
    comparison = Comparison(setup, workload, Limits(), sample=5, finalists=1)
    comparison.given({"full": 0.75, "state": 0.25}, lambda n: None)
    (outcome,) = comparison.outcomes.values()
    assert outcome.walls is not None
    assert outcome.walls["full"] / sum(outcome.walls.values()) == pytest.approx(0.75, abs=1e-3)
    assert not comparison.searches
