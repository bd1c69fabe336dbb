"""Tokens per second of a model on a workload of token ids, greedy, every request to its full length.

output_tokens_per_second    output tokens over the wall time of the whole batch, prefill included
prefill_tokens_per_second   prompt tokens over the time until the last request has its first token
decode_tokens_per_second    output tokens after that moment over the time after it
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.llm import LLM, RequestOutput
from isthmus.params import SamplingParams

RATES = ("output_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")


def run(args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Medians over `--repeat` runs in this process, after one short warm-up; raw samples beside them."""
    prompts = read_workload(args.workload)[: args.limit]
    if args.repeat < 1 or args.output_len < 1 or (args.limit is not None and args.limit < 1):
        raise ConfigError("--repeat, --limit and --output-len must be at least 1")
    settings = engine_args(args)
    llm = LLM(**settings)
    startup = time.perf_counter() - started
    _once(llm, prompts[:2], 2, use_tqdm=False)
    samples = [_once(llm, prompts, args.output_len, use_tqdm=not args.json) for _ in range(args.repeat)]
    result: dict[str, Any] = {name: round(statistics.median(s[name] for s in samples), 1) for name in RATES}
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result | {
        "peak_rss_bytes": usage if sys.platform == "darwin" else usage * 1024,
        "startup_seconds": round(startup, 2),
        "model": llm.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "settings": {name: str(value) for name, value in settings.items()},
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": len(prompts) * args.output_len,
        "preemptions": llm.engine.scheduler.counters.preemptions,
        "samples": samples,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    prompt, output = result["prompt_tokens"], result["output_tokens"]
    yield f"{result['requests']} requests, {prompt:,} prompt and {output:,} output tokens"
    for name in RATES:
        raw = ", ".join(f"{sample[name]:.1f}" for sample in result["samples"])
        yield f"{name.replace('_', ' '):<28}{result[name]:>10.1f}   ({raw})"
    yield f"{'peak resident bytes':<28}{result['peak_rss_bytes']:>14,}"
    yield f"{'start-up seconds':<28}{result['startup_seconds']:>10.2f}"


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


def _once(llm: LLM, prompts: list[list[int]], output_len: int, *, use_tqdm: bool) -> dict[str, float]:
    counters = llm.engine.scheduler.counters
    before, waiting = counters.generation_tokens, set(range(len(prompts)))
    prefilled: tuple[float, int] | None = None  # when the last request had its first token; tokens until then

    def on_output(index: int, output: RequestOutput) -> None:
        nonlocal prefilled
        waiting.discard(index)
        if not waiting and prefilled is None:
            prefilled = time.perf_counter(), counters.generation_tokens - before

    llm.engine.reset_prefix_cache()  # or the second run would be spared its prefill
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=use_tqdm, on_output=on_output)
    end = time.perf_counter()
    tokens = counters.generation_tokens - before
    assert prefilled is not None
    last_first, tokens_then = prefilled
    return {
        "seconds": end - start,
        "output_tokens_per_second": tokens / (end - start),
        "prefill_tokens_per_second": sum(map(len, prompts)) / (last_first - start),
        "decode_tokens_per_second": (tokens - tokens_then) / max(1e-9, end - last_first),
    }
