"""The founding A/B: a server with static walls and one with unified memory, asked the same questions, round by round.

The bug that started this project sized a window group's page table by the window's own page count and indexed it with
the full side's ids: right on a fresh server, wrong once churn had used more ids than the window has pages. So each side
serves several rounds from one process, and the two sides must give the same answers in every round.

churn   ids the server has minted at least, over the pages that the group with the largest pages could have; the bug
        shows from 1.0 on
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from isthmus.bench import churn
from isthmus.bench.evaluate import STOP, Question, correct, read_questions
from isthmus.bench.launch import Launched, launched
from isthmus.bench.load import Target, served_model
from isthmus.bench.replies import Reply, complete_all
from isthmus.engine.config import MemoryConfig
from isthmus.errors import ConfigError
from isthmus.flags import as_flags, engine_args

SIDES = ("static", "unified")
_PATIENCE = 10.0  # seconds that a server may take to tell of its memory
_SHOWN = 20  # differences that the result holds in full
_SIGMAS = 3.0  # standard errors that are no accident
_BLIND = 0.9  # of all answers
_COUNTS = ("rounds", "questions", "shots", "concurrency", "output_len", "repeat")

Answers = dict[tuple[int, str, int], list[Reply]]
"""By repetition, side and round, in the order of the questions."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve all rounds on both sides and compare.

    ConfigError for numbers or a data file that make no sense, a server that does not start, or one that refuses a
    question.
    """
    settings = _settings(args)
    questions = read_questions(args.data, args.shots, args.questions)
    servers: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    answers: Answers = {}
    total = args.repeat * len(SIDES) * args.rounds * len(questions)
    with TemporaryDirectory(prefix="isthmus-ab-") as folder, _bar(total) as bar:
        for repetition in range(1, args.repeat + 1):
            for side in SIDES if repetition % 2 else SIDES[::-1]:
                bar.set_description(f"{side} starts")
                command = _command(args, settings, side, Path(folder))
                before = _device_used()
                with launched(command, side) as server:
                    bench = _Bench(args, server, side, repetition, questions, bar)
                    servers.append(bench.describe() | {"device_used_mib_before": before})
                    samples += bench.rounds(answers)
    rates = {side: _median_rate(samples, side) for side in SIDES}
    return {
        "task": args.task,
        "model": settings["model"],
        "settings": {name: str(value) for name, value in settings.items()},
        "load": {name: getattr(args, name) for name in _COUNTS},
        "alive": {side: all(s["alive"] for s in samples if s["side"] == side) for side in SIDES},
        "output_tokens_per_second": rates,
        "unified_over_static": round(rates["unified"] / rates["static"], 4) if all(rates.values()) else None,
        "agreement": compare(answers),
        "servers": servers,
        "samples": samples,
    }


def failed(result: Mapping[str, Any]) -> bool:
    """Did a side die, or do the sides disagree?"""
    return not all(result["alive"].values()) or result["agreement"]["verdict"] not in ("agree", "rounding")


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    load = result["load"]
    yield (
        f"{result['task']} on {result['model']}: {load['questions']} questions behind {load['shots']} shots, "
        f"{load['concurrency']} at once, up to {load['output_len']} tokens each"
    )
    for server in result["servers"]:
        yield (
            f"{server['side']}: arena of {server['arena_bytes']:,} bytes, started in {server['startup_seconds']} s; "
            "own pages " + ", ".join(f"{name} {n:,}" for name, n in server["own_pages"].items())
        )
    yield (
        f"{'round':<7}{'side':<9}{'alive':<6}{'accuracy':>9}{'output tok/s':>14}{'KV tokens':>12}"
        f"{'graph bytes':>14}{'pages moved':>13}{'churn':>8}"
    )
    for sample in result["samples"]:
        yield (
            f"{sample['round']:<7}{sample['side']:<9}{'yes' if sample['alive'] else 'NO':<6}{sample['accuracy']:>9.1%}"
            f"{sample['output_tokens_per_second']:>14,.1f}{_count(sample['kv_tokens']):>12}"
            f"{_count(sample['graph_bytes']):>14}{_count(sample['moved_pages']):>13}{sample['churn']:>8.1f}"
        )
        yield from (f"  {error}" for error in sample["errors"])
    if result["unified_over_static"] is not None:
        yield f"output tok/s, median: unified over static {result['unified_over_static']}"
    yield from _verdict(result["agreement"])


def compare(answers: Answers) -> dict[str, Any]:
    """Question by question: text, number of tokens and the reason it ended must be the same.

    `unsteady` counts, per side, answers that are not those of its own first round: what rounding alone does when
    other requests share the step. Answers that failed are not compared.
    """
    differences = []
    unsteady = dict.fromkeys(SIDES, 0)
    compared = 0
    apart = np.zeros((2, max(map(len, answers.values()), default=0)))  # rounds of each question: sides, static itself
    for (repetition, side, turn), replies in answers.items():
        own = [i for i, _ in _differing(answers[repetition, side, 1], replies)]
        unsteady[side] += len(own)
        if side == "static":
            apart[1, own] += 1
        others = answers.get((repetition, "unified", turn))
        if side != "static" or others is None:
            continue
        compared += sum(a.error is None and b.error is None for a, b in zip(replies, others, strict=True))
        for i, at in _differing(replies, others):
            static, unified = replies[i].shown(), others[i].shown()
            where = {"repetition": repetition, "round": turn, "question": i + 1, "character": at}
            differences.append(where | {"static": static, "unified": unified})
            apart[0, i] += 1
    differences.sort(key=lambda found: (found["repetition"], found["round"], found["question"]))
    return {
        "compared": compared,
        "differ": len(differences),
        "by_round": _by_round(differences),
        "first": differences[0] if differences else None,
        "differences": differences[:_SHOWN],
        "unsteady": unsteady,
    } | _judge(compared, apart, sum(side == "static" for _, side, _ in answers), len({r for r, _, _ in answers}))


def _judge(compared: int, apart: NDArray[np.float64], rounds: int, repetitions: int) -> dict[str, Any]:
    """Whether the sides differ from each other more than static memory, which moves nothing, differs from itself.

    agree     not at all
    rounding  no more often: by question, the mean of (share of rounds apart - share of static's own) is below three
              times its standard error
    blind     no more often, but static answers nearly everything otherwise in every round
    differ    more often, or though static is steady
    nothing   there is no pair of answers
    """
    again = rounds - repetitions  # rounds of static that have a first one to be compared with
    if not compared:
        return {"verdict": "nothing"}
    if not apart[0].any():
        return {"verdict": "agree"}
    if not apart[1].any():
        return {"verdict": "differ"}
    sides, own = apart[0] / rounds, apart[1] / again
    excess = sides - own
    error = float(excess.std(ddof=1)) / math.sqrt(len(excess)) if len(excess) > 1 else 0.0
    more = float(excess.mean()) > _SIGMAS * error
    verdict = "differ" if more else "blind" if own.mean() > _BLIND else "rounding"
    shares = {"sides_differ": round(float(sides.mean()), 4), "static_differs": round(float(own.mean()), 4)}
    return {"verdict": verdict, **shares, "standard_error": round(error, 4)}


def _differing(ours: Sequence[Reply], theirs: Sequence[Reply]) -> Iterator[tuple[int, int]]:
    """Index of each question that was answered differently, and the first character that differs."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.error is None and b.error is None and a != b:
            pairs = enumerate(zip(a.text, b.text, strict=False))
            yield i, next((at for at, (x, y) in pairs if x != y), min(len(a.text), len(b.text)))


def _by_round(differences: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for difference in differences:
        name = f"{difference['repetition']}.{difference['round']}"
        found[name] = found.get(name, 0) + 1
    return found


def _verdict(agreement: Mapping[str, Any]) -> Iterator[str]:
    own = ", ".join(f"{side} in {count:,}" for side, count in agreement["unsteady"].items())
    yield f"answers unlike those of the same side's first round: {own}"
    first = agreement["first"]
    if not agreement["compared"]:
        yield "no pair of answers to compare"
        return
    if first is None:
        yield f"{agreement['compared']:,} pairs of answers compared: the sides agree"
        return
    yield from _difference(agreement, first)
    if "static_differs" not in agreement:
        yield "static answered as in its first round, always: this is not rounding"
        return
    yield (
        f"apart in {agreement['sides_differ']:.1%} of rounds, static from itself in {agreement['static_differs']:.1%}; "
        f"standard error of the difference {agreement['standard_error']:.1%}"
    )
    yield {
        "rounding": "the sides differ no more than static does from itself: this is rounding",
        "blind": "static differs from itself in nearly everything: nothing can be told, use --dtype float32",
        "differ": "the sides differ more than static does from itself: this is not rounding",
    }[agreement["verdict"]]


def _difference(agreement: Mapping[str, Any], first: Mapping[str, Any]) -> Iterator[str]:
    where = f"round {first['round']}, question {first['question']}, at character {first['character']}"
    yield f"{agreement['differ']:,} of {agreement['compared']:,} pairs of answers DIFFER, the first in {where}:"
    for side in SIDES:
        start = max(0, first["character"] - 40)
        yield f"  {side:<8} {first[side]['tokens']} tokens: {first[side]['text'][start : first['character'] + 40]!r}"


class _Bench:
    """The rounds of one server."""

    def __init__(
        self,
        args: argparse.Namespace,
        server: Launched,
        side: str,
        repetition: int,
        questions: Sequence[Question],
        bar: tqdm[Any],
    ) -> None:
        self._args = args
        self._server = server
        self._side = side
        self._repetition = repetition
        self._questions = questions
        self._bar = bar
        key = os.environ.get("ISTHMUS_API_KEY")  # the server will ask for it
        self._target = Target(server.url, asyncio.run(served_model(server.url, key)), key)
        self._kv_tokens = server.kv_tokens
        self._pool = self._look() or {}
        self._page_size = getattr(args, "page_size", MemoryConfig().page_size)
        self._tokens = 0  # computed and cached so far, at least

    def describe(self) -> dict[str, Any]:
        """What the server says of itself before the first question."""
        pool = self._pool
        return {
            "repetition": self._repetition,
            "side": self._side,
            "arena_bytes": pool["arena_bytes"],
            "kv_tokens": self._kv_tokens,
            "graph_bytes": pool.get("graph_bytes"),
            "startup_seconds": round(self._server.startup_seconds, 2),
            "own_pages": {group["name"]: pool["arena_bytes"] // group["page_bytes"] for group in pool["groups"]},
            "page_bytes": {group["name"]: group["page_bytes"] for group in pool["groups"]},
            "ids": pool["ids"]["capacity"],
        }

    def rounds(self, answers: Answers) -> Iterator[dict[str, Any]]:
        """One sample per round, answers put into `answers`. A side that died serves no further round."""
        for turn in range(1, self._args.rounds + 1):
            self._bar.set_description(f"{self._side} round {turn}")
            start = time.perf_counter()
            replies = self._ask()
            seconds = time.perf_counter() - start
            answers[self._repetition, self._side, turn] = replies
            sample = self._sample(turn, replies, seconds)
            self._bar.set_postfix_str(f"{sample['output_tokens_per_second']:,.1f} tok/s")
            yield sample
            if not sample["alive"]:
                return

    def _ask(self) -> list[Reply]:
        prompts = [question.prompt for question in self._questions]
        body = {"max_tokens": self._args.output_len, "temperature": 0, "stop": [STOP]}
        note = self._bar.update
        replies = asyncio.run(complete_all(self._target, prompts, body, self._args.concurrency, lambda _: note()))
        for i, reply in enumerate(replies):
            if reply.refused:
                raise ConfigError(f"question {i + 1}: the {self._side} server refuses it: {reply.error}")
        return replies

    def _sample(self, turn: int, replies: list[Reply], seconds: float) -> dict[str, Any]:
        before, after = self._pool, self._look()
        alive = after is not None and all(reply.error is None for reply in replies)
        tokens = sum(reply.tokens for reply in replies)
        self._tokens += tokens + sum(reply.prompt_tokens - reply.cached_tokens for reply in replies)
        errors = {reply.error for reply in replies if reply.error is not None}
        right = correct([reply.text for reply in replies], self._questions)
        if not alive:
            errors.add(f"last line of its log: {self._server.last_words}")
        self._pool = after or before
        return {
            "repetition": self._repetition,
            "round": turn,
            "side": self._side,
            "alive": alive,
            "correct": right,
            "accuracy": right / len(replies),
            "seconds": round(seconds, 3),
            "output_tokens": tokens,
            "output_tokens_per_second": tokens / seconds,
            "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
            "cached_tokens": sum(reply.cached_tokens for reply in replies),
            "kv_tokens": self._kv_tokens,
            "graph_bytes": self._pool.get("graph_bytes"),
            "moved_pages": None if after is None else _moved(after) - _moved(before),
            "preemptions": None if after is None else after["preemptions"] - before["preemptions"],
            "churn": round(self._churn(), 2),
            "errors": sorted(errors),
        }

    def _churn(self) -> float:
        capacity = self._pool["ids"]["capacity"]
        named = [group for group in self._pool["groups"] if group["table_entries"] == capacity + 1]
        own = min(self._pool["arena_bytes"] // group["page_bytes"] for group in named)
        return float(self._tokens / self._page_size / own)

    def _look(self) -> dict[str, Any] | None:
        """`/v1/pool`; None where nothing serves any more."""
        try:
            request = urllib.request.Request(f"{self._server.url}/v1/pool", headers=self._target.headers)
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Of the engine, for both sides. ConfigError for what cannot be."""
    if min(getattr(args, name) for name in _COUNTS if name != "shots") < 1 or args.shots < 0:
        raise ConfigError(
            "--rounds, --questions, --concurrency, --output-len and --repeat must be at least 1, --shots at least 0"
        )
    if args.config is None and not hasattr(args, "model"):
        args.model = "demo"
    settings = engine_args(args)
    if "memory" in settings:
        raise ConfigError("bench ab runs static and unified memory itself: leave out --memory")
    return (churn.SETTINGS if settings["model"] == churn.NAME else {}) | settings


def _command(args: argparse.Namespace, settings: Mapping[str, Any], side: str, folder: Path) -> list[str]:
    own = {name: value for name, value in settings.items() if side == "static" or not name.startswith("static_")}
    if settings["model"] == churn.NAME:
        own["model"] = churn.write(folder / churn.NAME)
    program = shlex.split(args.server_command) if args.server_command else [sys.executable, "-m", "isthmus"]
    flags = ["--memory", side, "--port", "0", "--max-queue", str(2 * args.concurrency)]
    return [*program, "serve", *as_flags(own), *flags]


def _bar(total: int) -> tqdm[Any]:
    return tqdm(total=total, unit="answer", disable=None, dynamic_ncols=True)


def _device_used() -> list[int] | None:
    """MiB in use on each NVIDIA GPU before a server starts, so that a foreign process shows; None without the tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    values = done.stdout.split()
    return [int(value) for value in values] if done.returncode == 0 and all(map(str.isdigit, values)) else None


def _moved(pool: Mapping[str, Any]) -> int:
    return sum(group["moved_pages"] for group in pool["groups"])


def _median_rate(samples: Sequence[Mapping[str, Any]], side: str) -> float:
    rates = [s["output_tokens_per_second"] for s in samples if s["side"] == side and s["alive"]]
    return round(statistics.median(rates), 1) if rates else 0.0


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
