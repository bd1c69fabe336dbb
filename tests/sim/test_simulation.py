"""The loop in virtual time: it repeats itself, loses nothing, and coasting changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from isthmus.engine.config import SchedulerConfig
from isthmus.errors import ConfigError
from isthmus.sim.arrivals import Arrival, synthetic
from isthmus.sim.machine import MACHINES
from isthmus.sim.shape import Model, read_model
from isthmus.sim.simulation import Outcome, Setup, Simulation
from isthmus.sim.summary import Limits, summary, timeline
from tests.sim.conftest import STATES, WINDOWS, write


def setup_of(path: Path, arena: int = 64 << 20, **more: int | None) -> Setup:
    return Setup(read_model(path), MACHINES["h200"], arena, SchedulerConfig(32, 512), **more)  # type: ignore[arg-type]


def chats(count: int, rate: float) -> list[Arrival]:
    """Conversations of three turns each, every prompt the one before and more: (blocks of 512 tokens)."""
    plain = synthetic([(count, 1, 1)], rate, 3)
    rng = np.random.default_rng(5)
    found = []
    for i, arrival in enumerate(plain):
        chat, turn = i % (count // 3), 3 * i // count
        blocks = (0, *(1 + 3 * chat + part for part in range(turn + 1)))
        length = 512 * (len(blocks) - 1) + int(rng.integers(1, 513))
        found.append(dataclasses.replace(arrival, input=length, output=int(rng.integers(1, 90)), blocks=blocks,
                                         block_size=512))  # fmt: skip
    return found


def facts(outcome: Outcome) -> tuple[object, ...]:
    """All that is reported, exactly."""
    tally = outcome.tally
    times = (tally.first.tobytes(), tally.last.tobytes(), tally.end.tobytes())
    return (*times, summary(outcome, Limits(0.1, 0.01)), timeline(outcome))


def test_the_same_workload_gives_the_same_result_bit_for_bit(groups_file: Path) -> None:
    setup, arrivals = setup_of(groups_file), chats(60, 200)
    assert facts(Simulation(setup).run(arrivals)) == facts(Simulation(setup).run(arrivals))


@pytest.mark.parametrize("rate", [4, 40, 400])
@pytest.mark.parametrize("caching", [True, False])
def test_coasting_changes_nothing(groups_file: Path, rate: float, caching: bool) -> None:
    setup, arrivals = dataclasses.replace(setup_of(groups_file), prefix_caching=caching), chats(36, rate)
    quick, slow = Simulation(setup), Simulation(setup, coasting=False)
    told: list[int] = []
    quick.observe = lambda work, firsts: told.append(work.sequences)
    assert facts(quick.run(arrivals)) == facts(slow.run(arrivals))
    assert len(told) < quick.planner.counters.steps, "some steps were taken together"
    assert quick.pool.moved_pages == slow.pool.moved_pages


def test_every_request_ends_with_all_its_tokens(groups_file: Path) -> None:
    setup, arrivals = setup_of(groups_file, 8 << 20), chats(60, 400)
    over: list[int] = []
    simulation = Simulation(setup, note=over.append)
    result = summary(simulation.run(arrivals), Limits())
    assert result["finished"] == result["good"] == len(arrivals) == sum(over)
    assert result["output_tokens"] == simulation.planner.counters.generation_tokens == sum(a.output for a in arrivals)
    assert result["prompt_tokens"] == sum(a.input for a in arrivals)
    assert result["running"]["most"] < 8 < result["requests"], "the arena is too small for all at once"
    cached = result["cache"]["hit_rate"] * result["prompt_tokens"]
    again = result["prompt_tokens"] + result["output_tokens"] - len(arrivals) - cached
    assert result["computed_tokens"] >= round(again)
    assert np.isfinite(simulation.run([]).tally.first).all()
    simulation.pool.check()


def test_times_are_those_of_the_cost_model(tmp_path: Path) -> None:
    """One request alone: a prefill step, then decodes."""
    setup = setup_of(write(tmp_path, WINDOWS))
    tally = Simulation(setup).run([Arrival(5.0, 100, 3)]).tally
    model, machine = setup.model, setup.machine
    lengths = [(0, 100), (100, 1), (101, 1)]
    seconds = [
        float(machine.seconds(model.shape.work(model.groups, np.array([past]), np.array([new]), 1)))
        for past, new in lengths
    ]
    assert tally.first[0] == pytest.approx(5 + seconds[0])
    assert tally.end[0] == pytest.approx(5 + sum(seconds))
    assert tally.gaps()[1].sum() == 2


def test_a_request_that_never_fits_is_counted_and_the_others_run(tmp_path: Path) -> None:
    setup = setup_of(write(tmp_path, WINDOWS))
    outcome = Simulation(setup).run([Arrival(0, 9000, 5), Arrival(1, 10, 5)])
    result = summary(outcome, Limits())
    assert (result["finished"], result["refused"], result["good"]) == (1, 1, 1)
    assert "9,000 tokens" in result["first_refusal"]


def test_limits_count_who_was_served_in_time(tmp_path: Path) -> None:
    setup = setup_of(write(tmp_path, WINDOWS))
    outcome = Simulation(setup).run(synthetic([(200, 400, 40)], None, 0))
    waits = outcome.tally.first
    limit = float(np.median(waits))
    assert summary(outcome, Limits(ttft=limit))["good"] == int((waits <= limit).sum())
    assert summary(outcome, Limits(itl=1e-6))["good"] == 0


def test_blocks_that_requests_share_are_hits(groups_file: Path) -> None:
    setup = setup_of(groups_file)
    first, again = Arrival(0, 1500, 5, (1, 2, 3), 512), Arrival(10, 1500, 5, (1, 2, 3), 512)
    shared = summary(Simulation(setup).run([first, again]), Limits())["cache"]
    assert shared["hit_rate"] == pytest.approx(1488 / 3000), "all full pages but for the last token"
    stranger = dataclasses.replace(again, blocks=(4, 2, 3))
    assert summary(Simulation(setup).run([first, stranger]), Limits())["cache"]["hit_rate"] == 0
    none = dataclasses.replace(setup, prefix_caching=False)
    assert summary(Simulation(none).run([first, again]), Limits())["cache"]["hit_rate"] == 0


def test_snapshots_at_intervals_restore_only_multiples(tmp_path: Path) -> None:
    path = write(tmp_path, STATES)
    first, again = Arrival(0, 1500, 5, (1, 2, 3), 512), Arrival(10, 1500, 5, (1, 2, 3), 512)

    def cached(interval: int | None) -> int:
        outcome = Simulation(setup_of(path, 256 << 20, snapshots=interval)).run([first, again])
        return round(float(summary(outcome, Limits())["cache"]["hit_rate"]) * 3000)

    assert [cached(n) for n in (None, 16, 256, 512, 1024, 4096)] == [1488, 1488, 1280, 1024, 1024, 0]


def test_snapshots_at_intervals_need_states(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to save"):
        Simulation(setup_of(write(tmp_path, WINDOWS), snapshots=512))
    with pytest.raises(ConfigError, match="not a multiple of the page size"):
        Simulation(setup_of(write(tmp_path, STATES), snapshots=100))


def test_moves_cost_time(tmp_path: Path) -> None:
    model: Model = read_model(write(tmp_path, WINDOWS))
    past, new = np.array([64]), np.array([1])
    still, moved = (model.shape.work(model.groups, past, new, 1, n) for n in (0, 1000))
    assert float(moved.caches - still.caches) == 2000
