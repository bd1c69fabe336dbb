"""The verb `replay`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError
from isthmus.flags import Parser

if TYPE_CHECKING:
    from isthmus.memory import Replay
    from isthmus.memory.replay import Event
    from isthmus.replay.summary import Summary
    from isthmus.replay.timeline import Timeline


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    """Its flags."""
    parser = verbs.add_parser("replay", help="execute a --journal again, check it, and draw it")
    parser.add_argument("journal", type=Path, metavar="FILE", help="what --journal wrote")
    parser.add_argument(
        "--check-every",
        type=int,
        default=1,
        metavar="N",
        help="check all equations after every N-th record (default 1)",
    )
    parser.add_argument("--html", type=Path, metavar="OUT", help="an interactive page of the arena over time")
    parser.add_argument("--png", type=Path, metavar="OUT", help="the same as a picture")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit codes: 0 all as recorded, 1 a divergence or a broken equation, 2 (IsthmusError) not a journal."""
    from isthmus.memory import JournalError, Replay  # noqa: PLC0415 (a verb that is not run imports nothing)
    from isthmus.replay.summary import Summary  # noqa: PLC0415
    from isthmus.replay.timeline import Timeline  # noqa: PLC0415

    if args.check_every < 1:
        raise ConfigError(f"--check-every must be at least 1, not {args.check_every}")
    try:
        life = Replay(args.journal)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    summary = Summary(life)
    timeline = Timeline(life) if args.html or args.png else None
    problem = _execute(life, summary, timeline, args.check_every)
    lines = [*summary.lines(), problem or _verdict(args.check_every)]
    if timeline is not None:
        _draw(timeline, lines, args)
    if args.json:
        print(json.dumps(summary.as_dict() | {"divergence": problem}))
    else:
        print("\n".join(lines[:-1] if problem else lines))
    if problem:
        print(f"isthmus: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _execute(life: Replay, summary: Summary, timeline: Timeline | None, every: int) -> str | None:
    """Run all of it, as far as it goes; what is wrong in it."""
    from isthmus.memory import DivergenceError  # noqa: PLC0415

    last: Event | None = None
    problem = None
    try:
        for last in _watched(life):
            summary.note(last)
            if timeline is not None:
                timeline.note(last)
            if not last.index % every:
                life.pool.check()
        life.pool.check()
    except DivergenceError as error:
        problem = f"first divergence: {error}"
    except AssertionError as error:
        assert last is not None
        where = f"record {last.number} ({last.code.name.lower()}), step {last.step}"
        said = str(error).partition("\n")[0]
        problem = f"{life.path}: {where}: an equation does not hold: {said}"
    if timeline is not None:
        timeline.finish(last)
    return problem


def _watched(life: Replay) -> Iterator[Event]:
    """The events, with a progress bar on a terminal."""
    from tqdm import tqdm  # noqa: PLC0415

    with tqdm(life, total=life.records, desc="replay", unit="rec", disable=None, leave=False) as bar:
        yield from bar


def _verdict(every: int) -> str:
    often = "every record" if every == 1 else f"every {every} records"
    return f"every outcome is as recorded; all equations hold (checked after {often})"


def _draw(timeline: Timeline, lines: list[str], args: argparse.Namespace) -> None:
    from isthmus.replay import page, picture  # noqa: PLC0415

    if args.png:
        picture.write(timeline, args.png)
    if args.html:
        page.write(timeline, lines, args.html)
