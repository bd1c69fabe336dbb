"""`isthmus generate`: complete a batch of prompts and print the text as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from isthmus.engine.dryrun import ranked_walls
from isthmus.errors import ConfigError
from isthmus.flags import engine_args, sampling_params
from isthmus.llm import LLM, Prompt, RequestOutput
from isthmus.memory import ArenaUsage
from isthmus.params import SamplingParams

WIDTH = 96  # columns that streamed text is wrapped to while a progress bar stands below it


@dataclass(frozen=True)
class Job:
    """One prompt of the batch and how to sample it."""

    prompt: Prompt
    title: str  # how it is announced in the output
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """What a batch did to the arena."""

    fullest: ArenaUsage
    seconds: float
    output_tokens: int
    steps: int
    most_running: int
    aborted: int  # sequences that ended without what they were due


def run(args: argparse.Namespace) -> int:
    """Everything the verb does; raises IsthmusError for what the user must change."""
    jobs = _jobs(args, sampling_params(args))
    settings = engine_args(args)
    if args.compare_static and settings.get("memory") == "static":
        raise ConfigError("--compare-static runs unified memory first: leave out --memory static")
    if args.compare_static and settings.get("journal") is not None:
        raise ConfigError("--compare-static runs two pools, and a journal is the life of one: leave out --journal")
    llm = LLM(**settings)
    if args.map:
        print(llm.certificate(), file=sys.stderr)
    if args.compare_static:  # what the process pays once must not count against the side that runs first
        llm.generate([job.prompt for job in jobs[:2]], replace(jobs[0].params, max_tokens=2), use_tqdm=False)
        llm.engine.reset_prefix_cache()
    first = _complete(llm, jobs, _printer(jobs, as_json=args.json))
    if args.map:
        print(_map("unified" if llm.engine.pool.walls is None else "static", first), file=sys.stderr)
    if args.compare_static:
        print(_compare(llm, jobs, first), file=sys.stderr)
    if llm.journal is not None:
        llm.journal.close()
        print(f"journal of {llm.journal.records:,} records in {llm.journal.path}", file=sys.stderr)
    return 1 if first.aborted else 0


def _complete(llm: LLM, jobs: Sequence[Job], printer: Printer | None) -> Run:
    """Run the batch, printing; notes the arena at its fullest step."""
    fullest, most_running = llm.usage(), 0
    scheduler = llm.engine.scheduler

    def on_output(index: int, output: RequestOutput) -> None:
        nonlocal fullest, most_running
        most_running = max(most_running, len(scheduler.running))
        usage = llm.usage()
        if usage.live > fullest.live:
            fullest = usage
        if printer is not None:
            printer.show(index, output)

    before = scheduler.counters.steps
    start = time.perf_counter()
    prompts, params = [job.prompt for job in jobs], [job.params for job in jobs]
    outputs = llm.generate(prompts, params, use_tqdm=len(jobs) > 1, on_output=on_output)
    tokens = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    seconds = time.perf_counter() - start
    aborted = sum(sequence.finish_reason == "abort" for output in outputs for sequence in output.outputs)
    return Run(fullest, seconds, tokens, scheduler.counters.steps - before, most_running, aborted)


def _map(name: str, done: Run) -> str:
    usage = done.fullest
    legend = ", ".join(f"{g.name[0].upper()} {g.name}" for g in usage.groups.values())
    return (
        f"\nthe {name} arena at its fullest step ({legend}, . holes, blank free)\n{usage.draw(WIDTH)}\n{usage.table()}"
    )


def _compare(llm: LLM, jobs: Sequence[Job], unified: Run) -> str:
    """The same batch, model and arena under the walls that suit this very batch best."""
    lengths = llm.lengths([job.prompt for job in jobs], [job.params for job in jobs])
    _, walls = ranked_walls(llm.layout.groups, llm.engine.pool.arena_bytes, llm.config.scheduler, lengths)[0]
    with llm.static(walls):
        print(f"\nagain with the walls under which this batch takes fewest steps: {_shares(walls)}", file=sys.stderr)
        static_run = _complete(llm, jobs, None)
        picture = _map("static", static_run)
    rows = [f"\n{'':<10}{'seconds':>9}{'output tok/s':>14}{'steps':>8}{'most at once':>14}{'fullest, live bytes':>21}"]
    for name, done in (("unified", unified), ("static", static_run)):
        rate = done.output_tokens / done.seconds
        start = f"{name:<10}{done.seconds:>9.1f}{rate:>14.1f}{done.steps:>8}"
        rows.append(f"{start}{done.most_running:>14}{done.fullest.live:>21,}")
    return picture + "\n" + "\n".join(rows)


def _shares(walls: Mapping[str, int]) -> str:
    total = sum(walls.values())
    return ", ".join(f"{name} {size / total:.0%}" for name, size in walls.items())


# -- prompts ------------------------------------------------------------------------------------------------------


def _jobs(args: argparse.Namespace, params: SamplingParams) -> list[Job]:
    if args.prompt and args.prompts:
        raise ConfigError("--prompt and --prompts exclude each other: give one of them")
    if args.prompts is not None:
        return list(_read(args.prompts, params))
    texts = args.prompt
    if not texts:
        if sys.stdin.isatty():
            print("reading a prompt from standard input; end it with Ctrl-D", file=sys.stderr)
        try:
            texts = [sys.stdin.read().removesuffix("\n")]
        except UnicodeDecodeError as error:
            raise ConfigError("standard input is not UTF-8 text") from error
    return [Job(text, _short(text), params) for text in texts]


def _read(path: Path, params: SamplingParams) -> Iterator[Job]:
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path}: no prompts in it")
    for number, line in enumerate(lines, 1):
        yield _job(path, number, line, params) if path.suffix == ".jsonl" else Job(line, _short(line), params)


def _job(path: Path, number: int, line: str, params: SamplingParams) -> Job:
    where = f"--prompts {path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: an object with prompt, prompt_file or prompt_token_ids is due")
    unknown = set(row) - {"prompt", "prompt_file", "prompt_token_ids", "title", "max_tokens"}
    if unknown:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}")
    given = [key for key in ("prompt", "prompt_file", "prompt_token_ids") if key in row]
    if len(given) != 1:
        raise ConfigError(f"{where}: exactly one of prompt, prompt_file and prompt_token_ids is due")
    value, title = row[given[0]], row.get("title", f"request {number}")
    most = row.get("max_tokens", params.max_tokens)
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not (ids if given == ["prompt_token_ids"] else isinstance(value, str)):
        raise ConfigError(f"{where}: {given[0]} must be {'a list of token ids' if 'ids' in given[0] else 'text'}")
    if not isinstance(title, str) or not (most is None or type(most) is int):
        raise ConfigError(f"{where}: title must be text and max_tokens a whole number")
    params = replace(params, max_tokens=most)
    if given == ["prompt_token_ids"]:
        return Job({"prompt_token_ids": value}, title, params)
    text = value if given == ["prompt"] else _text(path.parent / value)
    return Job(text, row.get("title", _short(text)), params)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


# -- printing -----------------------------------------------------------------------------------------------------


class Printer(Protocol):
    """Shows outputs as they grow."""

    def show(self, index: int, output: RequestOutput) -> None:
        """Request `index` of the batch is now this far."""
        ...


def _printer(jobs: Sequence[Job], *, as_json: bool) -> Printer:
    if as_json:
        return _Json()
    if len(jobs) == 1 and jobs[0].params.n == 1:
        return _Single()
    return _Ordered(jobs)


class _Json:
    """One object a request, when it is complete."""

    def show(self, index: int, output: RequestOutput) -> None:
        if output.finished:
            tqdm.write(json.dumps(_as_dict(index, output)), file=sys.stdout)


def _as_dict(index: int, output: RequestOutput) -> dict[str, Any]:
    outputs = [
        {"text": o.text, "token_ids": list(o.token_ids), "finish_reason": o.finish_reason, "stop_reason": o.stop_reason}
        for o in output.outputs
    ]
    return {"index": index, "prompt_tokens": len(output.prompt_token_ids), "outputs": outputs}


class _Single:
    """One continuation: every piece of text at once, as it is decoded."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, index: int, output: RequestOutput) -> None:
        text = output.outputs[0].text
        print(text[self._shown :], end="\n" if output.finished else "", flush=True)
        self._shown = len(text)


class _Ordered:
    """A batch: the first request that is not complete streams in whole lines above the progress bar; the others wait.

    Lines are wrapped, because a bar below cannot stand beside half a line.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._titles = [job.title for job in jobs]
        self._latest: dict[int, RequestOutput] = {}
        self._current = 0  # whose turn it is
        self._shown = 0  # characters of its text that are printed
        self._announced = False

    def show(self, index: int, output: RequestOutput) -> None:
        self._latest[index] = output
        while self._current in self._latest:
            current = self._latest[self._current]
            self._stream(current)
            if not current.finished:
                return
            del self._latest[self._current]
            self._current, self._shown, self._announced = self._current + 1, 0, False

    def _stream(self, output: RequestOutput) -> None:
        if not self._announced:
            _line(f"\n> {self._titles[self._current]}")
            self._announced = True
        text = "\n~~\n".join(o.text for o in output.outputs) if output.finished else output.outputs[0].text
        while self._shown < len(text):
            end = _break(text, self._shown, last=output.finished)
            if end is None:
                return
            _line(text[self._shown : end].rstrip("\n"))
            self._shown = end


def _break(text: str, start: int, *, last: bool) -> int | None:
    """Where the next printed line ends: after a newline, at a space before WIDTH, or at the end of all."""
    newline = text.find("\n", start, start + WIDTH)
    if newline >= 0:
        return newline + 1
    if len(text) - start <= WIDTH:
        return len(text) if last else None
    space = text.rfind(" ", start + 1, start + WIDTH)
    return space + 1 if space > 0 else start + WIDTH


def _line(text: str) -> None:
    tqdm.write(text, file=sys.stdout)
