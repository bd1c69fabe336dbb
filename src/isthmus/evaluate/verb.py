"""`isthmus eval`: tasks of the lm-evaluation-harness, on a model in this process or on a running server.

The harness makes the requests and scores the answers; nothing here knows what a task is about.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError
from isthmus.flags import Parser, add_engine_flags, engine_args

if TYPE_CHECKING:
    from lm_eval.api.model import LM

_KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better", "samples")
"""What a result has of the harness' own."""


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    """The verb and its flags."""
    parser = verbs.add_parser("eval", help="tasks of the lm-evaluation-harness, here or on a running server")
    add_engine_flags(parser)
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks", type=lambda text: text.split(","), required=True, metavar="NAME,NAME",
        help="as the harness calls them, or files of the kind that it reads",
    )  # fmt: skip
    group.add_argument("--include-path", type=Path, metavar="DIR", help="a folder with more tasks")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    group.add_argument("--num-fewshot", type=int, metavar="N", help="solved examples before each; default: the task's")
    group.add_argument("--apply-chat-template", action="store_true", help="ask by the model's chat template")
    server = parser.add_argument_group("a running server (MODEL is where its tokenizer is)")
    server.add_argument("--url", metavar="URL", help="where it listens, such as http://127.0.0.1:8000")
    server.add_argument("--api-key", metavar="KEY", help="default: ISTHMUS_API_KEY")
    server.add_argument("--served-model-name", metavar="NAME", help="default: the first model it offers")
    server.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="requests under way (default %(default)s)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE", help="write the result there too, as JSON")
    output.add_argument("--log-samples", action="store_true", help="with every question and answer in the JSON")
    output.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print. IsthmusError for tasks, data, models and servers that cannot be had."""
    settings = engine_args(args)
    _check(args, settings)
    with _harness():
        from isthmus.evaluate import tasks as evaluate_tasks  # noqa: PLC0415 (the harness, torch: not for --help)
    from isthmus.bench import report  # noqa: PLC0415

    for name in ("lm_eval", "datasets", "huggingface_hub"):  # they remark on every task and every try
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):  # the harness prints what it likes
        tasks = evaluate_tasks.find(args.tasks, args.include_path)
        found = evaluate_tasks.evaluate(
            _model(args, settings),
            tasks,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
            chat=args.apply_chat_template,
            samples=args.log_samples,
        )
    result = {
        "model": settings["model"],
        "settings": {"limit": args.limit, "num_fewshot": args.num_fewshot, "url": args.url}
        | {"apply_chat_template": args.apply_chat_template},
        "lm_eval": evaluate_tasks.VERSION,
        **{name: found[name] for name in _KEPT if name in found},
    }
    try:
        report.show(result, args.json, lines)
    finally:  # though nobody may read what is shown any more
        if args.output is not None:
            with _named(args.output), args.output.open("w") as file, contextlib.redirect_stdout(file):
                report.show(result, True, lines)
    return 0


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The harness' own tables."""
    from lm_eval.utils import make_table  # noqa: PLC0415

    yield f"{result['model']}, lm_eval {result['lm_eval']}, {_said(result['settings'])}"
    yield make_table(result)
    if result.get("groups"):
        yield make_table(result, "groups")


def _said(settings: dict[str, Any]) -> str:
    """What differs from a task as it is."""
    given = [f"{name} {value}" for name, value in settings.items() if value not in (None, False)]
    return ", ".join(given) or "tasks as they are"


def _check(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What is wrong before anything is loaded."""
    for flag, value, least in (("--limit", args.limit, 1), ("--num-fewshot", args.num_fewshot, 0)):
        if value is not None and value < least:
            raise ConfigError(f"{flag} {value}: give at least {least}")
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency {args.concurrency}: give at least 1")
    if args.include_path is not None and not args.include_path.is_dir():
        raise ConfigError(f"--include-path {args.include_path}: no such folder")
    if args.output is not None:
        _try_to_write(args.output)
    if args.log_samples and args.output is None and not args.json:
        raise ConfigError("--log-samples goes into the JSON: give --output or --json too")
    if args.url is None:
        for flag, value in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
            if value is not None:
                raise ConfigError(f"{flag} is for a server: give --url too, or leave it out")
    elif set(settings) - {"model"}:
        name = min(set(settings) - {"model"})
        raise ConfigError(f"{name} is a setting of an engine in this process, not of a server: leave it out with --url")


def _try_to_write(path: Path) -> None:
    """ConfigError if it cannot be. What is there stays, and what is not is not made."""
    with _named(path):
        there = path.exists()
        if there and not (path.is_file() or path.is_dir()):
            return  # a pipe, say: whoever reads it must not see it end
        path.open("a").close()
        if not there:
            path.unlink()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the system says of `--output` as one line."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--output {path}: {reason}: name a file that can be written") from error


@contextlib.contextmanager
def _harness() -> Iterator[None]:
    """Import what needs the harness. ConfigError says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "isthmus":
            raise
        raise ConfigError(f"eval needs the package {error.name}: pip install 'isthmus[eval]'") from error


def _model(args: argparse.Namespace, settings: dict[str, Any]) -> LM:
    if args.url is not None:
        from isthmus.endpoint import Endpoint  # noqa: PLC0415
        from isthmus.evaluate.server import server_model  # noqa: PLC0415

        endpoint = Endpoint(args.url, args.api_key or os.environ.get("ISTHMUS_API_KEY"))
        return server_model(
            endpoint, args.served_model_name, settings["model"], args.concurrency, chat=args.apply_chat_template
        )
    from isthmus.evaluate.engine import EngineLM  # noqa: PLC0415
    from isthmus.llm import LLM  # noqa: PLC0415

    return EngineLM(LLM(**settings), chat=args.apply_chat_template)
