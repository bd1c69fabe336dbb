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
    first, last = (rounds[i]["resident_bytes"] for i in (min(1, len(rounds) - 1), -1))
    return {
        "rounds": len(rounds),
        "requests": sum(r["requests"] for r in rounds),
        "hung_up": sum(r["hung_up"] for r in rounds),
        "failed": sum(r["failed"] for r in rounds),
        "live_bytes_left": max(r["live_bytes"] for r in rounds),
        "resident_growth": round(last / first, 3),  # after the last round over after the second
        "output_tokens_per_second": round(float(np.median([r["output_tokens_per_second"] for r in rounds])), 1),
        "samples": rounds,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield (
        f"{result['rounds']} rounds, {result['requests']:,} requests, {result['hung_up']:,} hung up, "
        f"{result['failed']} failed, {result['live_bytes_left']} bytes left live"
    )
    yield f"median {result['output_tokens_per_second']} output tok/s, resident memory x {result['resident_growth']}"
    yield from sorted({error for r in result["samples"] for error in r["errors"]})


def _round(target: Target, pid: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    asks = [_ask(args, rng) for _ in range(args.concurrency)]
    start = time.perf_counter()
    answers = asyncio.run(closed_loop(target, asks, args.concurrency, lambda answer: None))
    seconds = time.perf_counter() - start
    wrong = [_wrong(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
    return {
        "requests": len(asks),
        "hung_up": sum(answer.hung_up for answer in answers),
        "failed": sum(text is not None for text in wrong),
        "errors": sorted({text for text in wrong if text is not None}),
        "seconds": round(seconds, 2),
        "output_tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "live_bytes": _live_bytes(target.url),
        "resident_bytes": _resident(pid),
    }


def _ask(args: argparse.Namespace, rng: np.random.Generator) -> Ask:
    prompt, output = int(rng.integers(1, 2 * args.prompt_len)), int(rng.integers(1, 2 * args.output_len))
    hang_up = int(rng.integers(1, output + 1)) if rng.random() < args.hang_up else None
    return Ask(rng.integers(3, 250, prompt).tolist(), output, hang_up)


def _wrong(ask: Ask, answer: Answer) -> str | None:
    if answer.hung_up:
        return None
    if answer.error is not None:
        return answer.error
    if answer.done != 1:
        return f"{answer.done} times [DONE]"
    return None if answer.tokens == ask.output_len else f"{answer.tokens} tokens instead of {ask.output_len}"


def _live_bytes(url: str) -> int:
    """Bytes of live pages once nobody is served any more; what is left after a minute is a leak."""
    end = time.monotonic() + _PATIENCE
    while True:
        with urllib.request.urlopen(f"{url}/v1/pool") as answer:
            pool = json.load(answer)
        live = sum(group["bytes"]["live"] for group in pool["groups"])
        if live == 0 or time.monotonic() > end:
            return int(live)
        time.sleep(0.05)


def _resident(pid: int) -> int:
    """Resident bytes of a process and its children (Linux)."""
    found = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if pid in (int(fields["Pid"]), int(fields["PPid"])):
                found += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
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
