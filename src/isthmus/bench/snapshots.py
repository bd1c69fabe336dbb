"""Where should states be saved? Multi-turn chats of a model with states, without the model: hit rates of the engine's
rule and of fixed intervals.

Several conversations share a system prompt; each turn sends the whole history again with some new tokens. The real
scheduler, pool and prefix cache plan every step; tokens are random, seeded.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from isthmus.engine import sizing
from isthmus.engine.config import EngineConfig
from isthmus.engine.sequence import Request
from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.memory import Copies, Group, Pool
from isthmus.params import SamplingParams
from isthmus.plan import shape
from isthmus.sim.planner import Planner


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every rule in turn, each on an empty arena. ConfigError for a model without states."""
    if min(args.conversations, args.turns, args.system, args.user, args.answer) < 1:
        raise ConfigError("--conversations, --turns, --system, --user and --answer must be at least 1")
    config = EngineConfig.build(**engine_args(args))
    found = shape.load(config)
    layout = found.layout
    if not any(group.kind == "state" for group in layout.groups):
        raise ConfigError(f"{found.name} keeps no states, so there is nothing to save")
    arena = config.memory.pool_bytes or sizing.DEFAULT_POOL_BYTES
    rules = {"engine": None} | {f"every {n}": n for n in args.intervals}
    return {
        "model": found.name,
        "arena_bytes": arena,
        "state_bytes": sum(group.spec.page_bytes for group in layout.groups if group.kind == "state"),
        "conversations": args.conversations,
        "turns": args.turns,
        "tokens": {"system": args.system, "user": args.user, "answer": args.answer},
        "rules": {name: _chat(layout.groups, arena, config, n, args) for name, n in rules.items()},
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{result['model']}, states of {result['state_bytes']:,} bytes, an arena of {result['arena_bytes']:,}"
    yield f"{'states saved':<16}{'cached':>8}{'states copied':>15}"
    for name, rule in result["rules"].items():
        yield f"{name:<16}{rule['cached_tokens'] / rule['prompt_tokens']:>8.1%}{rule['copied_states']:>15,}"


def _chat(
    groups: Sequence[Group], arena: int, config: EngineConfig, interval: int | None, args: argparse.Namespace
) -> dict[str, int]:
    pool, rng = Pool(arena, groups), random.Random(0)
    longest = args.system + args.turns * (args.user + args.answer)
    planner = Planner(
        pool,
        config.scheduler,
        max_model_len=longest + 1,
        prefix_caching=True,
        page_size=config.memory.page_size,
        clock=time.monotonic,
        snapshots=interval,
    )
    system = _tokens(rng, args.system)
    histories = [list(system) for _ in range(args.conversations)]
    prompt_tokens = cached_tokens = copied = 0
    for turn in range(args.turns):
        requests = []
        for i, history in enumerate(histories):
            history.extend(_tokens(rng, args.user))
            params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
            requests.append(Request(f"{turn}.{i}", list(history), params))
            planner.add(requests[-1])
        while (step := planner.schedule()) is not None:
            copied += sum(len(op.source) for op in step.delta.ops if isinstance(op, Copies))
            planner.settle(step, _tokens(rng, len(step.samples)))
        for history, request in zip(histories, requests, strict=True):
            history.extend(request.sequences[0].output)
            prompt_tokens += request.receipt.prompt_tokens
            cached_tokens += request.receipt.cached_tokens
    pool.check()
    return {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "copied_states": copied}


def _tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1 << 20) for _ in range(n)]
