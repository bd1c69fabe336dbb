"""Prompts and nothing else: where the time goes, against the operations that nobody can avoid.

wall_ms         a batch of prompts, from the call to the last one's first token
steps           that it takes: chunks are as large as `--max-num-batched-tokens` has them
gpu.span_ms     of those steps, from the start of their work on the stream to its end
gpu.busy_ms     of that with a kernel running, by torch's profiler; gpu.by_class sums kernels
flops           multiplications and additions of weights and of attention's two products, over pairs that are not
                masked; of recurrences none
floor_ms        these at the rate of a matrix product in the same run or, if that takes longer, the weights once a step
                at the bandwidth of a copy

Prompts are random tokens, another set for every batch; nothing of them is cached.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from isthmus.bench.bandwidth import matmul_flops
from isthmus.bench.by_step import watched
from isthmus.bench.engine import facts, forward_cost, milliseconds, started
from isthmus.bench.trace import traced
from isthmus.engine import capacity
from isthmus.engine.backends import resolve_device
from isthmus.engine.config import EngineConfig
from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.llm import LLM
from isthmus.memory import Group
from isthmus.model.cost import ForwardCost
from isthmus.params import SamplingParams

SHAPES = ((16, 512), (1, 8192))
"""Prompts, and tokens of each."""

_PRODUCT = {"cuda": 8192, "cpu": 512}
_WIDTHS = torch.bfloat16, torch.float32
_SHOWN = 12  # kernels


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every shape in turn, on one engine."""
    shapes: Sequence[tuple[int, int]] = args.prompts or SHAPES
    if args.repeat < 1 or min(min(shape) for shape in shapes) < 1:
        raise ConfigError("--repeat and both numbers of --prompts must be at least 1")
    device = torch.device(resolve_device(EngineConfig.build(**engine_args(args))))
    # Of both widths, because the engine, which knows what the model is in, takes the memory.
    rates = {dtype.itemsize: matmul_flops(device, _PRODUCT[device.type], dtype=dtype) for dtype in _WIDTHS}
    llm, settings, bandwidth = started(args, max(count for count, _ in shapes))
    for count, tokens in shapes:
        _require_room(llm, count, tokens)
    rate, cost = rates[llm.dtype.itemsize], forward_cost(llm)
    found = []
    for count, tokens in shapes:
        print(f"{count} prompts of {tokens:,} tokens ...", file=sys.stderr)
        found.append(_measure(llm, count, tokens, args.repeat, cost, bandwidth, rate))
    more = {"repeat": args.repeat, "matmul_flops_per_second": round(rate), "shapes": found}
    return facts(llm, settings, bandwidth, cost) | more


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield (
        f"{result['model']} on a {result['device']}: weights {result['weight_bytes']:,} bytes, copy "
        f"{result['copy_bytes_per_second'] / 1e9:,.0f} GB/s, {result['dtype']} matrix product "
        f"{result['matmul_flops_per_second'] / 1e12:,.2f} TFLOP/s; milliseconds a batch, medians"
    )
    names = ("prompts", "tokens", "steps", "wall", "tokens/s", "GPU span", "GPU busy", "floor", "wall/fl", "GPU/fl")
    yield "".join(f"{name:>10}" for name in names)
    for one in result["shapes"]:
        gpu = one["gpu"] or {}
        row = [one["wall_ms"]["median"], one["tokens_per_second"], gpu.get("span_ms", {}).get("median")]
        row += [gpu.get("busy_ms"), one["floor_ms"], one["wall_over_floor"], one["gpu_over_floor"]]
        yield f"{one['prompts']:>10}{one['tokens']:>10,}{one['steps']:>10}" + "".join(
            f"{'-' if cell is None else format(cell, ',.2f'):>10}" for cell in row
        )
    traces = [one for one in result["shapes"] if one["gpu"]]
    for one in traces:
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in one["gpu"]["by_class_ms"].items())
        yield f"GPU, {one['prompts']} × {one['tokens']:,}: {parts}"
    for kernel in traces[-1]["gpu"]["kernels"] if traces else ():
        yield f"{kernel['ms']:>10.3f} ms {kernel['calls']:>8.1f} calls  {kernel['class']:<22}{kernel['name']:.80}"


def flops(cost: ForwardCost, groups: Sequence[Group], count: int, tokens: int) -> float:
    """Operations for so many prompts of so many tokens, each with one output."""
    windows = {group.name: group.window for group in groups}
    seen = np.arange(1, tokens + 1, dtype=np.int64)
    pairs = {name: int(np.minimum(seen, windows[name] or tokens).sum()) for name in cost.pair_flops}
    attention = sum(pairs[name] * each for name, each in cost.pair_flops.items())
    return count * (tokens * cost.token_flops + cost.sample_flops + attention)


def _require_room(llm: LLM, count: int, tokens: int) -> None:
    """ConfigError if the prompts would not be read side by side."""
    engine, config = llm.engine, llm.config
    if count > config.scheduler.max_num_seqs:
        raise ConfigError(f"--prompts {count},{tokens} are more than --max-num-seqs: raise that")
    if tokens >= engine.scheduler.max_model_len:
        raise ConfigError(
            f"--prompts {count},{tokens} need sequences of {tokens + 1:,} tokens, and this engine takes "
            f"{engine.scheduler.max_model_len:,}: lower the tokens, or raise --max-model-len or --pool-bytes"
        )
    fits = capacity.concurrent(engine.pool, tokens + 1, config.memory.max_total_tokens)
    if fits < count:
        raise ConfigError(
            f"only {fits:,} prompts of {tokens:,} tokens fit together, not {count:,}: lower --prompts, or raise "
            "--pool-bytes"
        )


def _measure(
    llm: LLM, count: int, tokens: int, repeat: int, cost: ForwardCost, bandwidth: float, rate: float
) -> dict[str, Any]:
    cuda = llm.config.device.device == "cuda"
    rng = np.random.default_rng(tokens)
    _batch(llm, count, tokens, rng)
    walls, spans, steps = [], [], 0
    for _ in range(repeat):
        with watched(llm.engine, cuda=cuda) as watch:
            walls.append(_batch(llm, count, tokens, rng))
            steps = len(watch.sizes)
            if cuda:
                spans.append(sum(watch.span()))
    gpu = None
    if cuda:
        with traced() as trace:
            _batch(llm, count, tokens, rng)
        gpu = {"span_ms": milliseconds(spans)} | trace.summary(1, _SHOWN)
    needed = flops(cost, llm.layout.groups, count, tokens)
    weights = steps * cost.weight_bytes(-(-count * tokens // steps))
    floor, wall = 1e3 * max(needed / rate, weights / bandwidth), milliseconds(walls)
    return {
        "prompts": count,
        "tokens": tokens,
        "steps": steps,
        "wall_ms": wall,
        "tokens_per_second": round(count * tokens / wall["median"] * 1e3, 1),
        "gpu": gpu,
        "flops": round(needed),
        "floor_ms": round(floor, 4),
        "wall_over_floor": round(wall["median"] / floor, 3),
        "gpu_over_floor": round(gpu["busy_ms"] / floor, 3) if gpu and gpu["busy_ms"] else None,
    }


def _batch(llm: LLM, count: int, tokens: int, rng: np.random.Generator) -> float:
    """Seconds for that many new prompts, which are forgotten afterwards."""
    ids = rng.integers(min(3, llm.layout.vocab_size - 1), llm.layout.vocab_size, (count, tokens))
    prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.engine.reset_prefix_cache()
    return seconds
