"""Unified against static memory: few long prompts among many short ones, in an arena too small for all of them.

Model, arena, batch and engine are the same; only the walls differ. `best` are the walls under which this very batch
takes the fewest steps, found by dry runs of the real scheduler over every division into twentieths; `wrong` are those
that hold every request and take the most: what a bad guess at start-up can cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from isthmus.engine.dryrun import ranked_walls
from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.llm import LLM, RequestOutput
from isthmus.params import SamplingParams

Batch = list[tuple[list[int], int]]
"""Token ids and output length of each request."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Each memory in turn, `--repeat` times round, so that a drifting machine hits all alike."""
    if args.repeat < 1:
        raise ConfigError("--repeat must be at least 1")
    if min(*args.long, *args.short) < 1:
        raise ConfigError("--long and --short take a count, a prompt and an output length of at least 1 each")
    settings = {"pool_bytes": 48 << 20} | engine_args(args)
    if settings.get("memory") == "static":
        raise ConfigError("bench split compares unified memory with static walls itself: leave out --memory static")
    llm = LLM(**settings)
    batch = make_batch(args.long, args.short, llm.layout.vocab_size)
    walls = _walls(llm, batch)
    sides: dict[str, list[dict[str, Any]]] = {name: [] for name in walls}
    for _ in range(args.repeat):
        for name, side in walls.items():
            with llm.static(side) if side is not None else nullcontext():
                sides[name].append(_once(llm, batch))
    summary = {
        name: {key: statistics.median(sample[key] for sample in samples) for key in samples[0]} | {"samples": samples}
        for name, samples in sides.items()
    }
    return {
        "model": llm.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "pool_bytes": llm.engine.pool.arena_bytes,
        "long": args.long,
        "short": args.short,
        "walls": {name: side for name, side in walls.items() if side is not None},
        "sides": summary,
        "unified_over_best": round(_rate(summary, "unified") / _rate(summary, "static best"), 3),
        "unified_over_wrong": round(_rate(summary, "unified") / _rate(summary, "static wrong"), 3),
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{result['pool_bytes']:,} bytes; long {result['long']}, short {result['short']} (count, prompt, output)"
    yield f"{'':<14}{'output tok/s':>13}{'steps':>8}{'mean running':>14}{'preemptions':>13}{'moved pages':>13}   walls"
    for name, side in result["sides"].items():
        walls = result["walls"].get(name, {})
        split = ", ".join(f"{group} {size / sum(walls.values()):.0%}" for group, size in walls.items())
        yield (
            f"{name:<14}{side['output_tokens_per_second']:>13.1f}{side['steps']:>8.0f}{side['mean_running']:>14.1f}"
            f"{side['preemptions']:>13.0f}{side['moved_pages']:>13.0f}   {split}"
        )
    yield f"unified over best {result['unified_over_best']}, over wrong {result['unified_over_wrong']}"


def make_batch(long: tuple[int, int, int], short: tuple[int, int, int], vocab_size: int) -> Batch:
    """Random token ids (seeded), long requests dealt evenly among the short ones."""
    rng = np.random.default_rng(0)
    shapes = [(prompt, output) for count, prompt, output in (long, short) for _ in range(count)]
    order = rng.permutation(len(shapes))
    return [(rng.integers(3, vocab_size, shapes[i][0]).tolist(), shapes[i][1]) for i in order]


def _walls(llm: LLM, batch: Batch) -> dict[str, Mapping[str, int] | None]:
    groups, arena = llm.layout.groups, llm.engine.pool.arena_bytes
    if len(groups) < 2:
        raise ConfigError(f"{llm.name} has one kind of cache: there is nothing to split")
    lengths = [(len(tokens), output) for tokens, output in batch]
    ranked = ranked_walls(groups, arena, llm.config.scheduler, lengths)
    return {"unified": None, "static best": ranked[0][1], "static wrong": ranked[-1][1]}


def _once(llm: LLM, batch: Batch) -> dict[str, Any]:
    scheduler, pool = llm.engine.scheduler, llm.engine.pool
    before = (scheduler.counters.steps, scheduler.counters.preemptions, sum(pool.moved_pages.values()))
    running: dict[int, int] = {}

    def on_output(index: int, output: RequestOutput) -> None:
        running[scheduler.counters.steps] = max(running.get(scheduler.counters.steps, 0), len(scheduler.running))

    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in batch]
    llm.engine.reset_prefix_cache()  # or the second run would be spared its prefill
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": t} for t, _ in batch], params, use_tqdm=False, on_output=on_output)
    seconds = time.perf_counter() - start
    return {
        "output_tokens_per_second": sum(output for _, output in batch) / seconds,
        "seconds": seconds,
        "steps": scheduler.counters.steps - before[0],
        "mean_running": statistics.mean(running.values()),
        "most_running": max(running.values()),
        "preemptions": scheduler.counters.preemptions - before[1],
        "moved_pages": sum(pool.moved_pages.values()) - before[2],
    }


def _rate(summary: Mapping[str, Any], side: str) -> float:
    rate: float = summary[side]["output_tokens_per_second"]
    return rate
