"""Where a run's time goes: its steps by kind.

decodes    every sequence has one token
prompts    some have more

device_seconds    between the begin and the end of such steps on the stream; on a CPU, the time that they take to run
idle_seconds      for which the stream stood still before them; on a CPU, all that is not a step
schedule_ms, launch_ms, settle_ms    of the host, medians, in the call that launches such a step. Where steps overlap,
                  that call settles the step before, and all of it runs beside the device.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isthmus.bench.stopwatch import Stopwatch, measured
from isthmus.engine.core import Engine
from isthmus.engine.output import RequestOutput

Row = dict[str, Any]


@contextlib.contextmanager
def watched(engine: Engine, *, cuda: bool) -> Iterator[Stopwatch]:
    """Meanwhile every step of the engine is timed, whoever asks for it."""
    step = engine.step
    with measured(engine, cuda=cuda) as watch:

        def timed() -> list[RequestOutput]:
            start = time.perf_counter()
            outputs = step()
            watch.lap(time.perf_counter() - start)
            return outputs

        vars(engine)["step"] = timed
        try:
            yield watch
        finally:
            del vars(engine)["step"]


def by_kind(watch: Stopwatch, *, cuda: bool) -> list[Row]:
    """A row for each kind of step that there was."""
    host = watch.host()
    device, idle = _times(watch, cuda=cuda)
    rows = []
    for kind, wanted in (("decodes", False), ("prompts", True)):
        steps = [i for i, (tokens, sequences) in enumerate(watch.sizes) if (tokens > sequences) == wanted]
        if steps:
            rows.append(_row(kind, steps, watch, device, idle, host))
    return rows


def spent(watch: Stopwatch, *, cuda: bool) -> list[float]:
    """Seconds by step: from when the one before it was over until it is, on the stream or on a CPU."""
    device, idle = _times(watch, cuda=cuda)
    return [ran + stood for ran, stood in zip(device, idle, strict=True)]


def typical(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a run whose steps each take their median over the runs: what happens on the machine to some steps of
    some runs is not in it. None if the runs do not take the same steps."""
    if len({tuple(run["step_tokens"]) for run in runs}) > 1:
        return None
    medians = [float(statistics.median(times)) for times in zip(*(run["step_ms"] for run in runs), strict=True)]
    return sum(medians) / 1e3


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For people."""
    yield (
        f"{'steps':<10}{'number':>8}{'sequences':>11}{'tokens':>9}{'device s':>10}{'ms each':>9}{'idle s':>8}"
        f"{'schedule ms':>13}{'launch ms':>11}{'settle ms':>11}"
    )
    for row in rows:
        seconds = row["device_seconds"]
        yield (
            f"{row['kind']:<10}{row['steps']:>8,}{row['sequences']:>11,.1f}{row['tokens']:>9,.1f}"
            f"{seconds:>10.2f}{1e3 * seconds / row['steps']:>9.2f}{row['idle_seconds']:>8.2f}"
            f"{row['schedule_ms']:>13.2f}{row['launch_ms']:>11.2f}{row['settle_ms']:>11.2f}"
        )


def _times(watch: Stopwatch, *, cuda: bool) -> tuple[list[float], list[float]]:
    """Seconds that each step ran, and for which nothing did before it."""
    if cuda:
        return watch.span(), watch.gaps()
    launch = watch.host()["launch"]
    ran = [launch[lap] for lap in watch.launched_in]
    return ran, [watch.wall[lap] - seconds for lap, seconds in zip(watch.launched_in, ran, strict=True)]


def _row(
    kind: str,
    steps: Sequence[int],
    watch: Stopwatch,
    device: Sequence[float],
    idle: Sequence[float],
    host: Mapping[str, Sequence[float]],
) -> Row:
    parts = {
        f"{name}_ms": round(1e3 * statistics.median(host[name][watch.launched_in[i]] for i in steps), 4)
        for name in ("schedule", "launch", "settle")
    }
    return {
        "kind": kind,
        "steps": len(steps),
        "sequences": statistics.mean(watch.sizes[i][1] for i in steps),
        "tokens": statistics.mean(watch.sizes[i][0] for i in steps),
        "device_seconds": sum(device[i] for i in steps),
        "idle_seconds": sum(idle[i] for i in steps),
    } | parts
