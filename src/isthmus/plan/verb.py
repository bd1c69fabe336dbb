"""`isthmus plan`: what fits a GPU, from a model's shape and the flags of `serve`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from isthmus.engine.config import EngineConfig, parse_size
from isthmus.errors import ConfigError
from isthmus.flags import Parser, add_engine_flags, engine_args
from isthmus.plan import gpus, workload

_WIDTH = 120  # of what goes into a file

_SIZES_NOTHING = {
    "device": "--device",
    "attention_backend": "--attention-backend",
    "enforce_eager": "--enforce-eager",
    "load_format": "--load-format",
}


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    """Add the verb."""
    parser = verbs.add_parser("plan", help="what fits a GPU, without one: bytes, tables, sequences, splits")
    add_engine_flags(parser)
    group = parser.add_argument_group("plan (MODEL may also be a config.json or a preset)")
    group.add_argument("--gpu", metavar="GPU", help=f"{', '.join(gpus.GPUS)}, or its memory such as 80g")
    group.add_argument(
        "-tp", "--tensor-parallel-size", "--tp", type=int, default=1, metavar="N", help="ranks that split the heads"
    )
    group.add_argument(
        "--weights", type=_size, metavar="X", help="bytes of all weights; default: every parameter in --dtype"
    )
    group.add_argument(
        "--reserve", type=_size, metavar="X", help="bytes beside weights and arena that running needs (assumed)"
    )
    group.add_argument(
        "--workload", action="append", metavar="W",
        help="N,P,O (N requests of P prompt and O output tokens) or a trace (.csv, .jsonl); repeatable",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=int, default=256, metavar="N", help="only the first N of each trace (default %(default)s)"
    )
    group.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    given = engine_args(args)
    if args.tensor_parallel_size < 1 or args.requests < 1:
        raise ConfigError("-tp and --requests take a number of at least 1")
    for flag, size in (("--weights", args.weights), ("--reserve", args.reserve)):
        if size is not None and args.gpu is None:
            raise ConfigError(f"{flag} says what a GPU's memory goes to: give --gpu too, or leave it out")
    gpu = None if args.gpu is None else gpus.find(args.gpu)
    asked = None if args.workload is None else workload.read(args.workload, args.requests)
    config = EngineConfig.build(**given).on("cpu" if gpu is None else "cuda", given)
    from isthmus.plan import budget, planner, shape  # noqa: PLC0415 (torch and Transformers: not for --help)

    model = shape.load(config, args.tensor_parallel_size)
    money = budget.budget(model, config.memory, gpu, args.weights, args.reserve)
    idle = [f"{flag} changes nothing in a plan" for name, flag in _SIZES_NOTHING.items() if name in given]
    plan = planner.make(model, config, money, asked)
    plan = dataclasses.replace(plan, notes=(*plan.notes, *idle))
    if args.json:
        print(json.dumps(dataclasses.asdict(plan)))
        return 0
    from rich.console import Console  # noqa: PLC0415

    from isthmus.plan import table  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for part in table.tables(plan):
        console.print(part)
    return 0


def _size(text: str) -> int:
    """argparse swallows the text of a ValueError; keep ours."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
