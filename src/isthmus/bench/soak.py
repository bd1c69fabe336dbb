"""A server under clients that come, stay, and vanish: nothing may be lost, and nothing may grow.

Each round sends `--concurrency` streams at once, lengths mixed, a share of which hang up at a random moment. A round is
good when every survivor got exactly its tokens and one `[DONE]`, nothing failed, and no page is live afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from isthmus.bench.load import Answer, Ask, Target, closed_loop, served_model
from isthmus.errors import ConfigError
from isthmus.flags import as_flags, engine_args

_PATIENCE = 60  # seconds until pages of vanished clients must be back
_REST = 2.0  # seconds between the end of a round and the look at memory: an engine without work gives free memory back


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds until `--minutes` have passed, at least `--rounds`."""
    if args.concurrency < 1 or args.rounds < 1 or not 0 <= args.hang_up <= 1:
        raise ConfigError("--concurrency and --rounds must be at least 1, --hang-up in [0, 1]")
    settings = engine_args(args)
    rng = np.random.default_rng(args.seed)
    rounds: list[dict[str, Any]] = []
    with _server(settings, args.concurrency) as (url, process):
        target = Target(url, asyncio.run(served_model(url, None)))
        end = time.monotonic() + args.minutes * 60
        with tqdm(desc="rounds", unit="round", disable=None) as bar:
            while len(rounds) < args.rounds or time.monotonic() < end:
                rounds.append(_round(target, process.pid, args, rng))
                bar.update()
    return {
        "rounds": len(rounds),
        "requests": sum(r["requests"] for r in rounds),
        "hung_up": sum(r["hung_up"] for r in rounds),
        "failed": sum(r["failed"] for r in rounds),
        "live_bytes_left": max(r["live_bytes"] for r in rounds),
        "resident_growth": _growth(rounds),
        "output_tokens_per_second": round(float(np.median([r["output_tokens_per_second"] for r in rounds])), 1),
        "samples": rounds,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield (
        f"{result['rounds']} rounds, {result['requests']:,} requests, {result['hung_up']:,} hung up, "
        f"{result['failed']} failed, {result['live_bytes_left']} bytes left live"
    )
    yield f"median {result['output_tokens_per_second']} output tok/s"
    first, last = (result["samples"][i]["resident_bytes"] for i in (min(1, result["rounds"] - 1), -1))
    for name, growth in result["resident_growth"].items():
        beside = " without the arena" if name == "engine" else ""
        yield f"resident memory of the {name}: {first[name]:,} -> {last[name]:,} bytes, x {growth}{beside}"
    yield from sorted({error for r in result["samples"] for error in r["errors"]})


def _round(target: Target, pid: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    asks = [_ask(args, rng) for _ in range(args.concurrency)]
    start = time.perf_counter()
    answers = asyncio.run(closed_loop(target, asks, args.concurrency, lambda answer: None))
    seconds = time.perf_counter() - start
    wrong = [_wrong(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
    pool = _idle_pool(target.url)
    busy_bytes = _resident(pid)
    time.sleep(_REST)
    return {
        "requests": len(asks),
        "hung_up": sum(answer.hung_up for answer in answers),
        "failed": sum(text is not None for text in wrong),
        "errors": sorted({text for text in wrong if text is not None}),
        "seconds": round(seconds, 2),
        "output_tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "live_bytes": _live_bytes(pool),
        "arena_bytes": pool["arena_bytes"] - pool["gap_bytes"],  # of its bytes, those that have been used
        "busy_bytes": busy_bytes,  # resident when the round ended
        "resident_bytes": _resident(pid),  # a moment later
    }


def _ask(args: argparse.Namespace, rng: np.random.Generator) -> Ask:
    prompt, output = int(rng.integers(1, 2 * args.prompt_len)), int(rng.integers(1, 2 * args.output_len))
    hang_up = int(rng.integers(1, output + 1)) if rng.random() < args.hang_up else None
    return Ask(rng.integers(3, 250, prompt).tolist(), output, hang_up, is_counted=True)


def _wrong(ask: Ask, answer: Answer) -> str | None:
    if answer.hung_up:
        return None
    if answer.error is not None:
        return answer.error
    if answer.done != 1:
        return f"{answer.done} times [DONE]"
    for count, what in ((answer.tokens, "tokens"), (answer.received, "tokens received")):
        if count != ask.output_len:
            return f"{count} {what} instead of {ask.output_len}"
    return None


def _idle_pool(url: str) -> dict[str, Any]:
    """The arena once nobody is served any more; pages that are live after a minute are a leak."""
    end = time.monotonic() + _PATIENCE
    while True:
        with urllib.request.urlopen(f"{url}/v1/pool") as answer:
            pool: dict[str, Any] = json.load(answer)
        if _live_bytes(pool) == 0 or time.monotonic() > end:
            return pool
        time.sleep(0.05)


def _live_bytes(pool: dict[str, Any]) -> int:
    return int(sum(group["bytes"]["live"] for group in pool["groups"]))


def _growth(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """By process: resident bytes after the last round over those after the second; the first warms up.

    Without the arena, whose size is fixed: the operating system counts it as it fills with cached prefixes.
    """
    first, last = rounds[min(1, len(rounds) - 1)], rounds[-1]

    def own(sample: dict[str, Any], name: str) -> int:
        return int(sample["resident_bytes"][name]) - (sample["arena_bytes"] if name == "engine" else 0)

    return {name: round(own(last, name) / own(first, name), 3) for name in first["resident_bytes"]}


def _resident(pid: int) -> dict[str, int]:
    """Resident bytes of a server's two processes (Linux): the front, and the engine, its child."""
    found = {"front": 0, "engine": 0}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            name = {pid: "front"}.get(int(fields["Pid"])) or {pid: "engine"}.get(int(fields["PPid"]))
            if name is not None:
                found[name] += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return found


@contextlib.contextmanager
def _server(settings: dict[str, Any], concurrency: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "isthmus", "serve", *as_flags(settings), "--port", "0"]
    command += ["--max-queue", str(2 * concurrency)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise ConfigError("the server did not start: see its message above")
        url = found[0].rstrip("/")
        _wait_ready(url, process)
        yield url, process
    finally:
        process.terminate()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise ConfigError("the server did not start: see its message above")
