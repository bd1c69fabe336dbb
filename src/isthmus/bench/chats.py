"""Multi-turn chats with the prefix cache and without: hit tokens and time to first token, turn by turn.

Several conversations share a system prompt; each turn sends the whole history again with some new tokens, as chat
clients do. Token ids are random (seeded), answers are the model's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.llm import LLM, RequestOutput
from isthmus.params import SamplingParams


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One side after the other in one process; every turn of all conversations is one batch."""
    if min(args.conversations, args.turns, args.system, args.user, args.answer) < 1:
        raise ConfigError("--conversations, --turns, --system, --user and --answer must be at least 1")
    settings = engine_args(args)
    sides = {}
    for name, caching in (("cached", True), ("cold", False)):
        llm = LLM(**settings | {"enable_prefix_caching": caching})
        sides[name] = _chat(llm, args)
        del llm
    return {
        "conversations": args.conversations,
        "turns": args.turns,
        "tokens": {"system": args.system, "user": args.user, "answer": args.answer},
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in sides["cached"]),
        "hit_tokens": sum(turn["cached_tokens"] for turn in sides["cached"]),
        "ttft_ms": {name: round(statistics.median(t["ttft_ms"] for t in turns), 1) for name, turns in sides.items()},
        "sides": sides,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    share = result["hit_tokens"] / result["prompt_tokens"]
    yield f"{result['hit_tokens']:,} of {result['prompt_tokens']:,} prompt tokens from the cache ({share:.1%})"
    yield f"{'turn':<6}{'prompt tokens':>14}{'cached':>9}{'TTFT ms cached':>16}{'TTFT ms cold':>14}"
    for i, (warm, cold) in enumerate(zip(result["sides"]["cached"], result["sides"]["cold"], strict=True), 1):
        start = f"{i:<6}{warm['prompt_tokens']:>14,}{warm['cached_tokens']:>9,}"
        yield f"{start}{warm['ttft_ms']:>16.1f}{cold['ttft_ms']:>14.1f}"
    yield f"median TTFT {result['ttft_ms']['cached']} ms with the cache, {result['ttft_ms']['cold']} ms without"


def _chat(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    high = min(llm.layout.vocab_size, 50_000)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    system = rng.integers(3, high, args.system).tolist()
    histories = [list(system) for _ in range(args.conversations)]
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    turns = []
    for _ in range(args.turns):
        for history in histories:
            history.extend(rng.integers(3, high, args.user).tolist())
        first: dict[int, float] = {}

        def on_output(index: int, output: RequestOutput, first: dict[int, float] = first) -> None:
            first.setdefault(index, time.perf_counter())

        start = time.perf_counter()
        prompts = [{"prompt_token_ids": history} for history in histories]
        outputs = llm.generate(prompts, params, use_tqdm=False, on_output=on_output)
        turns.append(
            {
                "prompt_tokens": sum(map(len, histories)),
                "cached_tokens": sum(output.num_cached_tokens for output in outputs),
                "ttft_ms": statistics.median((at - start) * 1e3 for at in first.values()),
            }
        )
        for history, output in zip(histories, outputs, strict=True):
            history.extend(output.outputs[0].token_ids)
    return turns
