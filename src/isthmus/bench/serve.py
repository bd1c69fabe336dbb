"""Latency and throughput of a running server, as its clients see them.

TTFT   time to the first piece of text        ITL   time between pieces        E2E   whole request
goodput   requests a second that kept the stated limits
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from isthmus.bench.load import Answer, Ask, Target, closed_loop, open_loop, served_model
from isthmus.bench.throughput import read_workload
from isthmus.errors import ConfigError

PERCENTILES = (50, 90, 99)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Send the load and sum it up. ConfigError for a server that is not there or numbers that make no sense."""
    if (args.rate is None) == (args.concurrency is None):
        raise ConfigError("give either --rate (open loop) or --concurrency (closed loop)")
    if args.requests < 1 or (args.rate or args.concurrency) <= 0:
        raise ConfigError("--requests, --rate and --concurrency must be greater than 0")
    url, key = args.url.rstrip("/"), args.api_key or os.environ.get("ISTHMUS_API_KEY")
    target = Target(url, args.served_model_name or asyncio.run(served_model(url, key)), key)
    asks = _asks(args)
    with tqdm(total=len(asks), desc="requests", unit="req", disable=None if not args.json else True) as bar:
        start = time.perf_counter()

        def note(answer: Answer) -> None:
            bar.update()

        if args.rate is not None:
            answers = asyncio.run(open_loop(target, asks, args.rate, note))
        else:
            answers = asyncio.run(closed_loop(target, asks, args.concurrency, note))
        seconds = time.perf_counter() - start
    return summary(answers, seconds, args.ttft_limit, args.itl_limit) | {
        "model": target.model,
        "load": {"rate": args.rate} if args.rate is not None else {"concurrency": args.concurrency},
    }


def summary(
    answers: Sequence[Answer], seconds: float, ttft_limit: float | None = None, itl_limit: float | None = None
) -> dict[str, Any]:
    """Percentiles in milliseconds over the complete answers; limits in milliseconds (ITL: the request's mean)."""
    good = [a for a in answers if a.ok and a.pieces]
    kept = [
        a
        for a in good
        if (ttft_limit is None or a.ttft * 1e3 <= ttft_limit)
        and (itl_limit is None or not a.gaps or float(np.mean(a.gaps)) * 1e3 <= itl_limit)
    ]
    return {
        "requests": len(answers),
        "complete": len(good),
        "hung_up": sum(a.hung_up for a in answers),
        "errors": sorted({a.error for a in answers if a.error}),
        "failed": sum(not a.ok and not a.hung_up for a in answers),
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(sum(a.tokens for a in good) / seconds, 1),
        "requests_per_second": round(len(good) / seconds, 3),
        "goodput_requests_per_second": round(len(kept) / seconds, 3),
        "limits_ms": {"ttft": ttft_limit, "itl": itl_limit},
        "cached_tokens": sum(a.cached_tokens for a in good),
        "ttft_ms": _percentiles([a.ttft for a in good]),
        "itl_ms": _percentiles([gap for a in good for gap in a.gaps]),
        "e2e_ms": _percentiles([a.end - a.start for a in good]),
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield (
        f"{result['complete']} of {result['requests']} requests complete in {result['seconds']} s, "
        f"{result['failed']} failed, {result['hung_up']} hung up"
    )
    yield from (f"  error: {error}" for error in result["errors"])
    yield f"{'':<6}" + "".join(f"{f'p{p}':>11}" for p in PERCENTILES) + f"{'mean':>11}   ms"
    for name in ("ttft", "itl", "e2e"):
        figures = result[f"{name}_ms"]
        yield f"{name.upper():<6}" + "".join(f"{figures[k]:>11.1f}" for k in (*(f"p{p}" for p in PERCENTILES), "mean"))
    yield f"output tokens/s {result['output_tokens_per_second']}, requests/s {result['requests_per_second']}, "
    yield f"goodput {result['goodput_requests_per_second']} requests/s under {result['limits_ms']}"


def _asks(args: argparse.Namespace) -> list[Ask]:
    """The workload file's prompts in turn, or random ids (seeded) of lengths spread around `--prompt-len`."""
    rng = np.random.default_rng(args.seed)
    if args.workload is not None:
        prompts = read_workload(args.workload)
        return [Ask(prompts[i % len(prompts)], args.output_len) for i in range(args.requests)]
    asks = []
    for _ in range(args.requests):
        length = int(rng.integers(max(1, args.prompt_len // 2), args.prompt_len * 3 // 2 + 1))
        output = int(rng.integers(max(1, args.output_len // 2), args.output_len * 3 // 2 + 1))
        hang_up = int(rng.integers(1, output + 1)) if rng.random() < args.hang_up else None
        asks.append(Ask(rng.integers(3, 250, length).tolist(), output, hang_up))
    return asks


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {f"p{p}": 0.0 for p in PERCENTILES} | {"mean": 0.0}
    found = np.percentile(np.array(values) * 1e3, PERCENTILES)
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, found, strict=True)} | {
        "mean": round(float(np.mean(values)) * 1e3, 2)
    }
