"""A machine's numbers from measurements: least squares over `isthmus bench step` and `bench throughput` results.

    minimise  Σ ((seconds predicted - measured) / measured)² + _PULL² Σ (number / number before - 1)²,  numbers >= 0

A measurement rarely tells all four apart: in decode steps of one context, cache bytes, operations and sequences grow
together. The second sum leaves what they do not tell as it was on the machine one starts from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.config import EngineConfig, parse_size
from isthmus.errors import ConfigError
from isthmus.sim.arrivals import Arrival, synthetic
from isthmus.sim.machine import Machine
from isthmus.sim.shape import Model, Work
from isthmus.sim.simulation import Setup, Simulation

Float64 = NDArray[np.float64]
ModelOf = Callable[[str], Model]
"""From the name in a result to the model."""

_PULL = 1e-3
_ROUNDS = 20
_PLENTY = 64 << 30  # bytes of an arena that a result says nothing of


@dataclass(frozen=True)
class Measured:
    """So much work took so long."""

    what: str  # for people: the file and which part of it
    work: Float64  # [steps, 6]: layers, sequences, weights, caches, products, pairs, as `Work` has them
    seconds: float  # of all steps together


def fit(machine: Machine, measured: Sequence[Measured], name: str, source: str) -> Machine:
    """The machine that explains measurements best, starting from another.

    Which of weights and products takes longer in a step depends on the machine: it is decided by the last one, and
    the next is fitted, until they agree.
    """
    start, seconds = _numbers(machine), np.array([one.seconds for one in measured])
    pull = _PULL * np.eye(len(start))
    target = np.concatenate((np.ones(len(measured)), np.full(len(start), _PULL)))
    numbers = start
    for _ in range(_ROUNDS):
        rows = np.array([_linear(one.work, numbers) for one in measured]) * start / seconds[:, None]
        found = start * np.maximum(nonnegative(np.vstack((rows, pull)), target), 1e-9)
        if np.allclose(found, numbers, rtol=1e-9, atol=0):
            break
        numbers = found
    layer, sequence, per_byte, per_flop = numbers.tolist()
    return dataclasses.replace(
        machine, name=name, source=source, layer_s=layer, sequence_s=sequence,
        bytes_per_s=1 / per_byte, flops_per_s=1 / per_flop,
    )  # fmt: skip


def predicted(machine: Machine, one: Measured) -> float:
    """Seconds that a machine needs for that work."""
    numbers = _numbers(machine)
    return float(_linear(one.work, numbers) @ numbers)


def _numbers(machine: Machine) -> Float64:
    return np.array([machine.layer_s, machine.sequence_s, 1 / machine.bytes_per_s, 1 / machine.flops_per_s])


def _linear(work: Float64, numbers: Float64) -> Float64:
    """[4]: layers, sequences, bytes and operations that count on a machine of these numbers."""
    layers, sequences, weights, caches, products, pairs = work.T
    reading = weights * numbers[2] >= products * numbers[3]
    read, flops = caches + np.where(reading, weights, 0), pairs + np.where(reading, 0, products)
    return np.array([layers.sum(), sequences.sum(), read.sum(), flops.sum()])


def nonnegative(matrix: Float64, target: Float64) -> Float64:
    """The x >= 0 that minimises |matrix x - target|, for full rank (active sets; Lawson and Hanson, 1974)."""
    x, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], np.bool_)
    for _ in range(8 * len(x)):
        slope = matrix.T @ (target - matrix @ x)
        slope[free] = -np.inf
        if free.all() or slope.max() <= 1e-12:
            break
        free[slope.argmax()] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            low = free & (best <= 0)
            if not low.any():
                break
            x = x + (x[low] / (x[low] - best[low])).min() * (best - x)
            free &= x > 1e-15
            x[~free] = 0
        x = best
    return x


def read_results(path: Path, model_of: ModelOf) -> list[Measured]:
    """What a JSON file of `bench step` or `bench throughput` says. ConfigError if it is of neither."""
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--calibrate {path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise ConfigError(f"--calibrate {path}: not JSON: {error}") from error
    try:
        if "batches" in result and "weight_bytes" in result:
            return _of_step(path.name, result, model_of(result["model"]))
        if "prefill_tokens_per_second" in result:
            return _of_throughput(path.name, result, model_of(result["model"]))
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"--calibrate {path}: {error} is missing or not as expected") from error
    raise ConfigError(f"--calibrate {path}: the result of `isthmus bench step` or `bench throughput` --json is due")


def _of_step(name: str, result: Mapping[str, Any], model: Model) -> list[Measured]:
    shape = model.shape
    found = [Measured(f"{name}: copy", np.array([[0, 0, 0, result["copy_bytes_per_second"], 0, 0]], np.float64), 1.0)]
    for one in result["batches"]:
        batch = one["batch"]
        products = batch * (shape.token_flops + shape.sample_flops)
        weights = one.get("weight_bytes", result["weight_bytes"])  # of experts, those that are read
        work = np.array([[shape.layers, batch, weights, one["kv_bytes"], products, 0]], np.float64)
        found.append(Measured(f"{name}: batch {batch}", work, one["wall_ms"]["median"] / 1e3))
    return found


def _of_throughput(name: str, result: Mapping[str, Any], model: Model) -> list[Measured]:
    """Until the last request has its first token, and after.

    Everything was there from the start, so which steps there are does not depend on how long they take: they are those
    of a run here.
    """
    batch, setup = batch_of(result), setup_of(result, model)
    works: list[Work] = []
    last_first = 0

    def observe(work: Work, firsts: int) -> None:
        nonlocal last_first
        works.append(work)
        last_first = len(works) if firsts else last_first

    Simulation(setup, coasting=False, observe=observe).run(batch)
    prefill = result["prompt_tokens"] / result["prefill_tokens_per_second"]
    whole = result["output_tokens"] / result["output_tokens_per_second"]
    parts = ((works[:last_first], prefill, "prefill"), (works[last_first:], whole - prefill, "decode"))
    return [Measured(f"{name}: {what}", _rows(part), seconds) for part, seconds, what in parts if part]


def _rows(works: Sequence[Work]) -> Float64:
    columns = [(w.layers, w.sequences, w.weights, float(w.caches), w.products, float(w.pairs)) for w in works]
    return np.array(columns, np.float64)


def batch_of(result: Mapping[str, Any]) -> list[Arrival]:
    """The workload of a `bench throughput` result, in its order."""
    flags = result["command"]
    shapes = [flags[i + 1] for i, flag in enumerate(flags) if flag == "--synthetic"]
    if shapes:
        three = [tuple(map(int, shape.split(","))) for shape in shapes]
        return synthetic([(n, prompt, output) for n, prompt, output in three], None, 0)
    requests = result["requests"]
    return [Arrival(0.0, result["prompt_tokens"] // requests, result["output_tokens"] // requests)] * requests


def setup_of(result: Mapping[str, Any], model: Model) -> Setup:
    """What ran it, on no machine in particular."""
    settings = result["settings"]
    device = "cuda" if result["environment"].get("device") else "cpu"
    given = {n: parse_size(settings[n]) for n in ("max_num_seqs", "max_num_batched_tokens") if n in settings}
    config = EngineConfig.build(model=model.name, **given).on(device, given).scheduler
    return Setup(model, NOWHERE, int(result.get("pool_bytes", _PLENTY)), config)


NOWHERE = Machine("none", "one second a step", 1.0, 0.0, float("inf"), float("inf"))
