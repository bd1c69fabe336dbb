"""The cost of a step, and a machine found again from what it would have measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import ConfigError
from isthmus.sim.arrivals import synthetic
from isthmus.sim.calibrate import Measured, batch_of, fit, nonnegative, predicted, read_results, setup_of
from isthmus.sim.machine import MACHINES, Machine, machine
from isthmus.sim.shape import Shape, pairs, read_model
from isthmus.sim.simulation import Simulation
from tests.sim.conftest import WINDOWS, write

TRUE = Machine("true", "", layer_s=4e-5, sequence_s=2e-6, bytes_per_s=3e12, flops_per_s=4e14)
START = MACHINES["h200"]


def measured(rows: np.ndarray) -> list[Measured]:
    plain = [Measured(str(i), row[None], 1.0) for i, row in enumerate(rows)]
    return [dataclasses.replace(one, seconds=predicted(TRUE, one)) for one in plain]


def test_known_coefficients_are_found_again() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 8192, 40)
    rows = np.stack(
        [rng.integers(10, 60, 40), rng.integers(1, 256, 40), np.full(40, 8e9), rng.uniform(0, 3e10, 40),
         tokens * 8e9, rng.uniform(0, 1e11, 40)],
        axis=1,
    )  # fmt: skip
    found = fit(START, measured(rows), "found", "here")
    for name in ("layer_s", "sequence_s", "bytes_per_s", "flops_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-2), name
    assert found.exchange_s == START.exchange_s, "not measured, so as before"


def test_what_measurements_do_not_tell_stays_as_it_was() -> None:
    rows = np.array([[26, batch, 2e9, 0, 0, 0] for batch in (1, 64, 256)], np.float64)
    found = fit(START, measured(rows), "found", "here")
    assert found.flops_per_s == pytest.approx(START.flops_per_s, rel=1e-6)
    assert found.sequence_s == pytest.approx(TRUE.sequence_s, rel=1e-2)


def test_least_squares_keep_out_what_would_be_negative() -> None:
    matrix, x = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([2.0, 0.5])
    assert nonnegative(matrix, matrix @ x) == pytest.approx(x)
    assert nonnegative(matrix, np.array([3.0, 2.0, 1.0]))[1] == 0


def test_a_step_result_becomes_measurements(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, WINDOWS))
    batches = [{"batch": n, "kv_bytes": n * 1e7, "wall_ms": {"median": 2.0 + n / 100}} for n in (1, 64)]
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"model": "m", "weight_bytes": 2e9, "batches": batches, "copy_bytes_per_second": 4e12}))
    copy, one, many = read_results(path, lambda name: model)
    assert copy.work[0, 3] == 4e12
    assert one.work[0, :4].tolist() == [24, 1, 2e9, 1e7]
    assert one.seconds == pytest.approx(0.00201)
    assert many.work[0, 4] == 64 * 2e9
    batches[1]["weight_bytes"] = 3e8
    path.write_text(json.dumps({"model": "m", "weight_bytes": 2e9, "batches": batches, "copy_bytes_per_second": 4e12}))
    assert read_results(path, lambda name: model)[2].work[0, 2] == 3e8, "experts that no token went to are not read"


def test_a_throughput_result_becomes_two_phases_of_a_run(tmp_path: Path) -> None:
    """What a machine would have measured is what the fit starts from: the phases' seconds are those of its steps."""
    model = read_model(write(tmp_path, WINDOWS))
    result = {
        "model": "m", "requests": 12, "prompt_tokens": 3600, "output_tokens": 240, "pool_bytes": 1 << 28,
        "settings": {"max_num_seqs": "8"}, "environment": {"device": "NVIDIA H200"},
        "command": ["bench", "throughput", "m", "--synthetic", "8,400,20", "--synthetic", "4,100,20"],
    }  # fmt: skip
    assert batch_of(result) == synthetic([(8, 400, 20), (4, 100, 20)], None, 0)
    setup = dataclasses.replace(setup_of(result, model), machine=TRUE)
    assert (setup.config.max_num_seqs, setup.config.max_num_batched_tokens) == (8, 8192)
    tally = Simulation(setup).run(batch_of(result)).tally
    prefill, whole = float(tally.first.max()), float(tally.end.max())
    result |= {"prefill_tokens_per_second": 3600 / prefill, "output_tokens_per_second": 240 / whole}
    path = tmp_path / "throughput.json"
    path.write_text(json.dumps(result))
    rows = read_results(path, lambda name: model)
    assert [row.seconds for row in rows] == [pytest.approx(prefill), pytest.approx(whole - prefill)]
    assert [predicted(TRUE, row) for row in rows] == [pytest.approx(row.seconds) for row in rows]


@pytest.mark.parametrize("text", ["{", "{}", '{"batches": [{}], "weight_bytes": 1, "model": "m"}'])
def test_any_other_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--calibrate .*x\.json"):
        read_results(path, lambda name: read_model(write(tmp_path, WINDOWS)))


def test_pairs_are_what_every_query_sees() -> None:
    for past in (0, 3, 9, 50):
        for new in (1, 4, 30):
            for window in (None, 1, 8, 40):
                seen = sum(min(p + 1, window or p + 1) for p in range(past, past + new))
                assert pairs(np.array([past]), np.array([new]), window)[0] == seen, (past, new, window)


def test_of_experts_those_are_read_that_tokens_go_to() -> None:
    shape = Shape(1, 10.0, 0.0, expert_bytes=32.0, experts=32, experts_per_token=4)
    read = [shape.work((), np.zeros((1, n), np.int64), np.ones(n, np.int64), n).weights for n in (1, 2, 10_000)]
    assert read == [pytest.approx(14), pytest.approx(10 + 32 * (1 - 0.875**2)), pytest.approx(42)]


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of h200, cpu"):
        machine("abacus")


def test_weights_and_products_overlap_and_the_rest_adds_up() -> None:
    device = Machine("d", "", layer_s=1.0, sequence_s=0.5, bytes_per_s=10, flops_per_s=20, exchange_s=0.25,
                     link_bytes_per_s=4)  # fmt: skip
    shape = Shape(2, 100.0, 30.0, pair_flops={"full": 20.0}, exchanges=4, exchange_bytes=8.0)
    work = shape.work((), np.array([4]), np.array([1]), 1)
    assert float(device.seconds(work)) == 2 + 0.5 + 10 + 0 + 1 + 2, (
        "100 bytes of weights take longer than 30 operations"
    )
    many = shape.work((), np.array([0]), np.array([10]), 1)
    assert float(device.seconds(many)) == 2 + 0.5 + 15 + 0 + 1 + 20
