"""Tokens per second of a model on a workload of token ids, greedy, every request to its full length.

output_tokens_per_second    output tokens over the wall time of the whole batch, prefill included
prefill_tokens_per_second   prompt tokens over the time until the last request has its first token
decode_tokens_per_second    output tokens after that moment over the time after it

`--against-static` runs unified memory and the best walls for this very workload in turn, in one process. Pairs of runs
change their order (unified static, static unified, ...), so that a drifting machine hits both sides alike and the
engine is rebuilt once a pair. With `--by-step` the sides are compared by `typical_seconds`, too: those of a run whose
steps each take their median over the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isthmus.bench import by_step
from isthmus.bench.walls import Walls, best_walls
from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.llm import LLM, RequestOutput
from isthmus.params import SamplingParams

RATES = ("output_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")
COUNTS = ("steps", "mean_running", "most_running", "preemptions", "moved_pages")

Batch = list[tuple[list[int], int]]
"""Token ids and output length of each request."""

Sides = dict[str, Walls | None]
"""Walls of each side that is measured; None: there are none."""


def run(args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Medians over `--repeat` runs in this process, after a short warm-up; raw samples beside them."""
    if args.repeat < 1 or args.output_len < 1 or (args.limit is not None and args.limit < 1):
        raise ConfigError("--repeat, --limit and --output-len must be at least 1")
    if any(min(shape) < 1 for shape in args.synthetic or ()):
        raise ConfigError("--synthetic takes a count, a prompt and an output length of at least 1 each")
    prompts = [] if args.workload is None else read_workload(args.workload)
    settings = engine_args(args)
    if args.against_static and "memory" in settings:
        raise ConfigError("--against-static runs unified memory and static walls itself: leave out --memory")
    llm = LLM(**settings)
    startup = time.perf_counter() - started
    batch = [(prompt, args.output_len) for prompt in prompts] or synthetic(args.synthetic, llm.layout.vocab_size)
    batch = batch[: args.limit]
    sides: Sides = {llm.config.memory.memory: None}
    dry: dict[str, int] = {}
    if args.against_static:
        lengths = [(len(prompt), output) for prompt, output in batch]
        found = best_walls(llm.layout.groups, llm.engine.pool.arena_bytes, llm.config.scheduler, lengths)
        sides["static"], dry = found.walls, {"unified": found.unified_steps, "static": found.steps}
    samples = _measure(llm, batch, sides, args.repeat, use_tqdm=not args.json, steps_too=args.by_step)
    summary = {name: _summary(of_side) for name, of_side in samples.items()}
    sizes = dataclasses.asdict(llm.config.scheduler)  # also where they are the default, which changes
    settings_used = {name: str(value) for name, value in (sizes | settings | {"model": llm.name}).items()}
    result = next(iter(summary.values())) | _facts(llm, batch) | {"startup_seconds": round(startup, 2)}
    result |= {"settings": settings_used}
    if not args.against_static:
        return result
    rates = {name: side["output_tokens_per_second"] for name, side in summary.items()}
    return result | {
        "sides": summary,
        "walls": sides["static"],
        "dry_run_steps": dry,
        "unified_over_static": round(rates["unified"] / rates["static"], 4),
        "unified_over_static_typical": _faster(summary["static"], summary["unified"]),
    }


def _faster(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """How many times as fast as `one` the `other` is, by their typical seconds; None if they have none."""
    before, after = one.get("typical_seconds"), other.get("typical_seconds")
    return None if before is None or after is None else round(before / after, 4)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    prompt, output = result["prompt_tokens"], result["output_tokens"]
    yield f"{result['requests']} requests, {prompt:,} prompt and {output:,} output tokens"
    for side, values in result.get("sides", {"": result}).items():
        for name in RATES:
            raw = ", ".join(f"{sample[name]:.1f}" for sample in values["samples"])
            yield f"{side:<8}{name.replace('_', ' '):<28}{values[name]:>10.1f}   ({raw})"
        yield f"{side:<8}" + ", ".join(f"{name.replace('_', ' ')} {values[name]:,.1f}" for name in COUNTS)
        if "by_step" in values:
            yield from by_step.lines(values["by_step"])
            if (seconds := values["typical_seconds"]) is not None:
                yield f"{side:<8}{'typical seconds':<28}{seconds:>10.2f}   (each step its median over the runs)"
    if "walls" in result:
        split = ", ".join(f"{group} {size:,}" for group, size in result["walls"].items())
        typical = result["unified_over_static_typical"]
        also = "" if typical is None else f", {typical} by typical seconds"
        yield f"unified over static {result['unified_over_static']}{also}; walls in bytes: {split}"
    yield f"{'peak resident bytes':<28}{result['peak_rss_bytes']:>14,}"
    yield f"{'start-up seconds':<28}{result['startup_seconds']:>10.2f}"


def synthetic(shapes: Sequence[tuple[int, int, int]], vocab_size: int) -> Batch:
    """Requests of random token ids, shuffled, the same ones every time.

    Args:
        shapes: `(count, prompt, output)` tokens of each sort of request.
        vocab_size: ids are below it.
    """
    rng = np.random.default_rng(0)
    sorts = [(prompt, output) for count, prompt, output in shapes for _ in range(count)]
    order = rng.permutation(len(sorts))
    return [(rng.integers(min(3, vocab_size - 1), vocab_size, sorts[i][0]).tolist(), sorts[i][1]) for i in order]


def read_workload(path: Path) -> list[list[int]]:
    """`{"prompt_token_ids": [[...], ...]}`. ConfigError says what is wrong with the file."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--workload {path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise ConfigError(f"--workload {path}: not JSON: {error}") from error
    prompts = data.get("prompt_token_ids") if isinstance(data, dict) else None
    if not isinstance(prompts, list) or not prompts or not all(map(_are_ids, prompts)):
        raise ConfigError(f'--workload {path}: an object with "prompt_token_ids", a list of lists of ids, is due')
    return prompts


def _are_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)


def _measure(
    llm: LLM, batch: Batch, sides: Sides, repeat: int, *, use_tqdm: bool, steps_too: bool
) -> dict[str, list[dict[str, Any]]]:
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    there, back = list(sides), list(sides)[::-1]
    order = [name for turn in range(repeat) for name in (back if turn % 2 else there)]
    for name, turns in itertools.groupby(order):
        walls = sides[name]
        with nullcontext() if walls is None else llm.static(walls):
            _once(llm, _warm_up(llm, batch), use_tqdm=False)
            once = _by_step if steps_too else _once
            samples[name] += [once(llm, batch, use_tqdm=use_tqdm) for _ in turns]
    return samples


def _warm_up(llm: LLM, batch: Batch) -> Batch:
    """Two tokens for two requests; on a GPU for as many as fill a step, so that its allocator has seen a full one."""
    count = 2
    if llm.config.device.device != "cpu":
        totals = itertools.accumulate(len(prompt) for prompt, _ in batch)
        count = max(count, sum(total <= 2 * llm.config.scheduler.max_num_batched_tokens for total in totals))
    return [(prompt, min(2, output)) for prompt, output in batch[:count]]


def _once(llm: LLM, batch: Batch, *, use_tqdm: bool) -> dict[str, Any]:
    scheduler, pool = llm.engine.scheduler, llm.engine.pool
    counters = scheduler.counters
    before, waiting = counters.generation_tokens, set(range(len(batch)))
    was = (counters.steps, counters.preemptions, sum(pool.moved_pages.values()))
    prefilled: tuple[float, int] | None = None  # when the last request had its first token; tokens until then
    running: dict[int, int] = {}  # sequences by step

    def on_output(index: int, output: RequestOutput) -> None:
        nonlocal prefilled
        step = counters.steps
        running[step] = max(running.get(step, 0), len(scheduler.running))
        waiting.discard(index)
        if not waiting and prefilled is None:
            prefilled = time.perf_counter(), counters.generation_tokens - before

    llm.engine.reset_prefix_cache()  # or the second run would be spared its prefill
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in batch]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in batch]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=use_tqdm, on_output=on_output)
    end = time.perf_counter()
    tokens = counters.generation_tokens - before
    assert prefilled is not None
    last_first, tokens_then = prefilled
    return {
        "seconds": end - start,
        "output_tokens_per_second": tokens / (end - start),
        "prefill_tokens_per_second": sum(len(prompt) for prompt, _ in batch) / (last_first - start),
        "decode_tokens_per_second": (tokens - tokens_then) / max(1e-9, end - last_first),
        "steps": counters.steps - was[0],
        "mean_running": statistics.mean(running.values()),
        "most_running": max(running.values()),
        "preemptions": counters.preemptions - was[1],
        "moved_pages": sum(pool.moved_pages.values()) - was[2],
    }


def _by_step(llm: LLM, batch: Batch, *, use_tqdm: bool) -> dict[str, Any]:
    cuda = llm.config.device.device == "cuda"
    with by_step.watched(llm.engine, cuda=cuda) as watch:
        sample = _once(llm, batch, use_tqdm=use_tqdm)
        times = [round(1e3 * seconds, 4) for seconds in by_step.spent(watch, cuda=cuda)]
        steps = {"step_tokens": [tokens for tokens, _ in watch.sizes], "step_ms": times}
        return sample | {"by_step": by_step.by_kind(watch, cuda=cuda)} | steps


def _facts(llm: LLM, batch: Batch) -> dict[str, Any]:
    """What was run, and the most memory that it took."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "peak_rss_bytes": usage if sys.platform == "darwin" else usage * 1024,
        "peak_gpu_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
        "model": llm.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "pool_bytes": llm.engine.pool.arena_bytes,
        "requests": len(batch),
        "prompt_tokens": sum(len(prompt) for prompt, _ in batch),
        "output_tokens": sum(output for _, output in batch),
    }


def _summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of everything, the samples beside them; steps are those of the sample in the middle."""
    numbers = [name for name, value in samples[0].items() if isinstance(value, int | float)]
    medians: dict[str, Any] = {name: round(statistics.median(x[name] for x in samples), 2) for name in numbers}
    if "by_step" in samples[0]:
        medians["by_step"] = sorted(samples, key=lambda sample: sample["seconds"])[len(samples) // 2]["by_step"]
        seconds = by_step.typical(samples)
        medians["typical_seconds"] = None if seconds is None else round(seconds, 4)
    return medians | {"samples": list(samples)}
