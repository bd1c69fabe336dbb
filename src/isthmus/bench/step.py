"""Decode steps at fixed batch sizes: where the time goes, against the bytes that a step cannot avoid to read.

wall_ms         one `Engine.step`, everything included
host_ms         of that on the host: schedule; launch; settle, which is the rest: results, text, outputs. Waiting for
                the device is left out. On a CPU the forward runs inside launch
told_host_ms    the same where every token is told of at once, as to clients that stream; else as `generate` has it:
                outputs at the end
host_calls      functions of the host that take most of a step, their own time, under a profiler that slows small ones
gpu.span_ms     from the start of a step's work on the stream to its end, gaps between kernels included
gpu.busy_ms     of that with a kernel running, by torch's profiler; gpu.by_class sums kernels
kv_bytes        of the live K/V, read, and of states, read and written
floor_ms        weights once, of experts those that somebody is routed to if routing is even; the live K/V once; states
                once and back; at the bandwidth of a copy in the same run

Requests have prompts of random tokens. Steps are measured when all of them decode.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.bench.engine import facts, forward_cost, milliseconds, started
from isthmus.bench.stopwatch import Stopwatch, measured
from isthmus.bench.trace import traced
from isthmus.engine import capacity
from isthmus.engine.wide_frame import wide_frame
from isthmus.errors import ConfigError
from isthmus.llm import LLM
from isthmus.memory import Group
from isthmus.model.cost import ForwardCost
from isthmus.params import SamplingParams

WARM = 5  # steps before those that are measured
TRACED = 8  # steps under the profiler
_SHOWN = 12  # kernels, and functions of the host


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every batch size in turn, on one engine."""
    if min(*args.batch, args.context, args.steps) < 1:
        raise ConfigError("--batch, --context and --steps must be at least 1")
    llm, settings, bandwidth = started(args, max(args.batch))
    _require_room(llm, args)
    cost = forward_cost(llm)
    batches = []
    for batch in args.batch:
        print(f"batch {batch} ...", file=sys.stderr)
        batches.append(_measure(llm, batch, args.context, args.steps, cost, bandwidth))
    return facts(llm, settings, bandwidth, cost) | {"context": args.context, "steps": args.steps, "batches": batches}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield (
        f"{result['model']} on a {result['device']}: context {result['context']:,}, weights {result['weight_bytes']:,} "
        f"bytes, copy {result['copy_bytes_per_second'] / 1e9:,.0f} GB/s; milliseconds a step, medians"
    )
    head = (
        "batch",
        "wall",
        "host",
        "schedule",
        "launch",
        "settle",
        "GPU span",
        "GPU busy",
        "floor",
        "wall/fl",
        "GPU/fl",
    )
    yield "".join(f"{name:>10}" for name in head)
    for one in result["batches"]:
        host, gpu = one["host_ms"], one["gpu"] or {}
        row = [one["wall_ms"]["median"], *(host[name]["median"] for name in ("total", "schedule", "launch", "settle"))]
        row += [gpu.get("span_ms", {}).get("median"), gpu.get("busy_ms")]
        row += [one["floor_ms"], one["wall_over_floor"], one["gpu_over_floor"]]
        yield f"{one['batch']:>10}" + "".join(f"{'-' if cell is None else format(cell, '.3f'):>10}" for cell in row)
    for one in result["batches"]:
        told = ", ".join(f"{name} {part['median']:.3f}" for name, part in one["told_host_ms"].items())
        yield f"host at batch {one['batch']} where every token is told of: {told}"
    for call in result["batches"][-1]["host_calls"]:
        yield f"{call['ms']:>10.3f} ms {call['calls']:>8.1f} calls  {call['name']:.80}"
    traces = [one for one in result["batches"] if one["gpu"]]
    for one in traces:
        parts = ", ".join(f"{kind} {ms:.3f}" for kind, ms in one["gpu"]["by_class_ms"].items())
        yield f"GPU at batch {one['batch']}: {parts}"
    for kernel in traces[-1]["gpu"]["kernels"] if traces else ():
        yield f"{kernel['ms']:>10.3f} ms {kernel['calls']:>8.1f} calls  {kernel['class']:<22}{kernel['name']:.80}"


def cache_bytes(groups: Sequence[Group], lengths: Sequence[int]) -> float:
    """Bytes that decodes read of K/V, and read and write of states, by the tokens of each sequence, its newest
    included."""
    total = 0.0
    for group in groups:
        if group.kind == "state":
            total += 2 * group.spec.page_bytes * len(lengths)
        else:
            token_bytes = sum(part.nbytes for part in group.spec.parts) / group.spec.page_size
            total += token_bytes * sum(min(n, group.window or n) for n in lengths)
    return total


def _require_room(llm: LLM, args: argparse.Namespace) -> None:
    """ConfigError if the largest batch would not run as one."""
    engine, batch, config = llm.engine, max(args.batch), llm.config
    if batch > config.scheduler.max_num_seqs:
        raise ConfigError(f"--batch {batch} is more than --max-num-seqs {config.scheduler.max_num_seqs}: raise that")
    # While the last prompts are read, the first sequences decode already.
    prefill = -(-batch * args.context // max(1, config.scheduler.max_num_batched_tokens - batch)) + WARM
    length = args.context + prefill + 2 * WARM + 2 * args.steps + 2 * TRACED
    longest = engine.scheduler.max_model_len
    if length > longest:
        raise ConfigError(
            f"--context {args.context:,} and --steps {args.steps:,} need sequences of {length:,} tokens, and this "
            f"engine takes {longest:,}: lower them, or raise --max-model-len or --pool-bytes"
        )
    fits = capacity.concurrent(engine.pool, length, config.memory.max_total_tokens)
    if fits < batch:
        raise ConfigError(
            f"only {fits:,} sequences of {length:,} tokens fit together, not {batch:,}: "
            "lower --batch, --context or --steps, or raise --pool-bytes"
        )


def _measure(llm: LLM, batch: int, context: int, steps: int, cost: ForwardCost, bandwidth: float) -> dict[str, Any]:
    cuda = llm.config.device.device == "cuda"
    with _decoding(llm, batch, context, at_end=False):
        told = _timed_steps(llm, batch, steps)
    with _decoding(llm, batch, context, at_end=True):
        before = _lengths(llm)
        watch = _timed_steps(llm, batch, steps)
        after = _lengths(llm)
        calls = _profiled_steps(llm)
        gpu = _traced_steps(llm) if cuda else None
    live = (cache_bytes(llm.layout.groups, before) + cache_bytes(llm.layout.groups, after)) / 2
    weights = cost.weight_bytes(batch)
    floor = (weights + live) / bandwidth * 1e3
    wall = milliseconds(watch.wall)
    if gpu is not None:
        gpu = {"span_ms": milliseconds(watch.span())} | gpu
    return {
        "batch": batch,
        "wall_ms": wall,
        "host_ms": {name: milliseconds(times) for name, times in watch.host().items()},
        "told_host_ms": {name: milliseconds(times) for name, times in told.host().items()},
        "host_calls": calls,
        "gpu": gpu,
        "weight_bytes": round(weights),
        "kv_bytes": round(live),
        "floor_ms": round(floor, 4),
        "wall_over_floor": round(wall["median"] / floor, 3),
        "gpu_over_floor": round(gpu["busy_ms"] / floor, 3) if gpu and gpu["busy_ms"] else None,
    }


@contextlib.contextmanager
def _decoding(llm: LLM, batch: int, context: int, *, at_end: bool) -> Iterator[None]:
    """Meanwhile so many requests decode."""
    engine, running = llm.engine, llm.engine.scheduler.running
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    names = [f"{batch}.{i}" for i in range(batch)]
    for name in names:
        engine.add_request(name, rng.integers(3, llm.layout.vocab_size, context).tolist(), params, at_end=at_end)
    try:
        while len(running) < batch or int(running.past.min()) < context:
            engine.step()
        for _ in range(WARM):
            engine.step()
        yield
    finally:
        for name in names:
            engine.abort(name)
        engine.drain()
        engine.reset_prefix_cache()


@wide_frame
def _timed_steps(llm: LLM, batch: int, steps: int) -> Stopwatch:
    engine = llm.engine
    with measured(engine, cuda=llm.config.device.device == "cuda") as watch:
        for _ in range(2):  # a step that was launched before comes in
            engine.step()
        watch.reset()
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            watch.lap(time.perf_counter() - start)
    if set(watch.sizes) != {(batch, batch)}:
        raise ConfigError(f"not all {batch} sequences ran in every step: raise --pool-bytes, or lower --context")
    return watch


def _profiled_steps(llm: LLM) -> list[dict[str, Any]]:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(TRACED):
        llm.engine.step()
    profile.disable()
    entries = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)[:_SHOWN]
    return [
        {"name": _name(entry.code), "calls": entry.callcount / TRACED, "ms": round(entry.inlinetime * 1e3 / TRACED, 4)}
        for entry in entries
    ]


def _name(code: Any) -> str:
    """Of a function in Python by its file, of any other as it calls itself."""
    return code if isinstance(code, str) else f"{Path(code.co_filename).name}: {code.co_qualname}"


def _traced_steps(llm: LLM) -> dict[str, Any]:
    with traced() as trace:
        for _ in range(TRACED):
            llm.engine.step()
    return trace.summary(TRACED, _SHOWN)


def _lengths(llm: LLM) -> list[int]:
    return [sequence.length for sequence in llm.engine.scheduler.running]
