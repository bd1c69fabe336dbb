"""`isthmus simulate`: a workload in virtual time, under one arena and under walls."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.engine.config import CACHE_DTYPES, DTYPES, parse_fractions, parse_size
from isthmus.errors import ConfigError
from isthmus.flags import Parser

if TYPE_CHECKING:
    from isthmus.sim.load import Loaded
    from isthmus.sim.machine import Machine
    from isthmus.sim.simulation import Outcome, Setup
    from isthmus.sim.summary import Limits
    from isthmus.sim.workload import Workload

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    """Add the verb."""
    parser = verbs.add_parser("simulate", help="a workload in virtual time: unified memory against static splits")
    parser.add_argument("model", nargs="?", help="a preset, a config.json, or whatever serve takes")
    parser.add_argument("--groups", type=Path, metavar="FILE", help="instead of MODEL: its groups and costs as JSON")
    _add_workload(parser.add_argument_group("workload"))
    _add_engine(parser.add_argument_group("engine"))
    _add_memory(parser.add_argument_group("memory"))
    output = parser.add_argument_group("output")
    output.add_argument("--ttft-limit", type=_milliseconds, metavar="MS", help="good requests have a token by then")
    output.add_argument(
        "--itl-limit", type=_milliseconds, metavar="MS", help="and a mean gap between tokens up to this"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="everything as one JSON object")
    output.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")
    parser.set_defaults(run=run)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help="requests; repeatable")
    group.add_argument(
        "--synthetic", type=_shape, action="append", default=[], metavar="N,P,O",
        help="N requests of P prompt and O output tokens; repeatable, all of them shuffled",
    )  # fmt: skip
    group.add_argument("--rate", type=_positive, metavar="R", help="synthetic requests a second; default: all at once")
    group.add_argument(
        "--alternate", type=_seconds, metavar="300s", help="traces take turns of so long; default: all at once"
    )
    group.add_argument(
        "--rate-scale", type=_rates, default=(1.0,), metavar="X[,X]", help="traces play X times as fast, each or all"
    )
    group.add_argument("--limit", type=_count, metavar="N", help="only the first N requests of each trace")
    group.add_argument("--duration", type=_seconds, metavar="3600s", help="nothing arrives later")
    group.add_argument("--block-size", type=_count, default=512, metavar="N", help="tokens of a block (default 512)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of synthetic requests (default 0)")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--machine", default="h200", metavar="NAME", help="h200 or cpu: what a step costs (default h200)"
    )
    group.add_argument(
        "--calibrate", type=Path, action="append", default=[], metavar="FILE",
        help="fit the machine to results of bench step and bench throughput; repeatable",
    )  # fmt: skip
    group.add_argument("-tp", "--tensor-parallel-size", "--tp", type=_count, default=1, metavar="N", help="ranks")
    group.add_argument("--weights", type=parse_size, metavar="X", help="bytes of all weights; default: counted")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model")
    group.add_argument(
        "--kv-cache-dtype", choices=tuple(CACHE_DTYPES), default="auto", help="of cached keys and values"
    )
    group.add_argument("--page-size", type=_count, default=16, metavar="N", help="tokens per page (default 16)")
    group.add_argument("--max-model-len", type=parse_size, metavar="N", help="most tokens of a request")
    group.add_argument("--max-num-seqs", type=_count, metavar="N", help="at once (default as in serve)")
    group.add_argument(
        "--max-num-batched-tokens", type=parse_size, metavar="N", help="of one step (default as in serve)"
    )
    group.add_argument("--no-enable-prefix-caching", action="store_true", help="compute every prompt anew")
    group.add_argument(
        "--snapshots", type=_snapshots, metavar="branch|N",
        help="save states where the engine does (default), or at multiples of N tokens alone",
    )  # fmt: skip


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pool-bytes", type=parse_size, metavar="X", help="the arena; default: what the device has left"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=_positive, default=0.9, metavar="X", help="of the device (default 0.9)"
    )
    group.add_argument(
        "--memory", choices=("unified", "static", "both"), help="default: both, for a model with several groups"
    )
    group.add_argument(
        "--static-split", type=parse_fractions, metavar="X", help="also this one, such as full=0.5,window=0.5"
    )
    group.add_argument(
        "--search-requests", type=_count, default=400, metavar="N",
        help="sample of the workload that splits are searched on (default 400)",
    )  # fmt: skip
    group.add_argument(
        "--finalists", type=_count, default=1, metavar="N", help="splits that see the whole workload (default 1)"
    )
    group.add_argument(
        "--phases", action="store_true", help="also the best split of each trace by itself, under all of them"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate every side and print the table."""
    from isthmus.sim import plot, report  # noqa: PLC0415 (NumPy and the scheduler: not for --help)
    from isthmus.sim.summary import Limits  # noqa: PLC0415

    if (args.model is None) == (args.groups is None):
        raise ConfigError("name a MODEL or give --groups FILE, one of the two")
    if args.plot is not None:
        plot.require(args.plot)
    workload = _workload(args)
    loaded, machine = _loaded(args), _machine(args)
    setup = _setup(args, loaded, machine)
    limits = Limits(**{k: v for k, v in (("ttft", args.ttft_limit), ("itl", args.itl_limit)) if v is not None})
    outcomes, searches = _sides(args, setup, workload, limits)
    result = _result(args, loaded, workload, limits, outcomes, searches)
    for line in report.lines(result):
        print(line)
    if args.json is not None:
        _write(args.json, result)
    if args.plot is not None:
        plot.draw(args.plot, outcomes, f"{setup.model.name}: {', '.join(workload.names)}")
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    from isthmus.sim import arrivals, traces  # noqa: PLC0415
    from isthmus.sim.workload import Workload  # noqa: PLC0415

    if bool(args.trace) == bool(args.synthetic):
        raise ConfigError("give a workload: --trace FILE or --synthetic N,P,O, one of the two")
    if args.alternate is not None and len(args.trace) < 2:
        raise ConfigError("--alternate switches between traces: give --trace at least twice")
    if args.rate is not None and not args.synthetic:
        raise ConfigError("--rate is of --synthetic requests; traces play at their own, times --rate-scale")
    names = [path.stem for path in args.trace] or ["synthetic"]
    if len(args.rate_scale) not in (1, len(names)):
        raise ConfigError(f"--rate-scale takes one factor or one for each of {len(names)} traces")
    rates = args.rate_scale * len(names) if len(args.rate_scale) == 1 else args.rate_scale
    if args.synthetic:
        read = [arrivals.synthetic(args.synthetic, args.rate, args.seed)[: args.limit]]
    else:
        read = [
            traces.read(path, trace=i, block_size=args.block_size, limit=args.limit)
            for i, path in enumerate(args.trace)
        ]
    played = tuple(tuple(arrivals.scaled(one, rate)) for one, rate in zip(read, rates, strict=True))
    return Workload(tuple(names), played, args.alternate, args.duration)


def _loaded(args: argparse.Namespace) -> Loaded:
    from isthmus.sim.load import Loaded, load  # noqa: PLC0415
    from isthmus.sim.shape import read_model  # noqa: PLC0415

    if args.groups is not None:
        if args.pool_bytes is None:
            raise ConfigError("--groups says nothing of a device: give --pool-bytes too")
        return Loaded(read_model(args.groups), str(args.groups), args.pool_bytes, "--pool-bytes")
    gpu = None if args.machine == "cpu" else args.machine
    return load(_engine_config(args, args.model), gpu, args.tensor_parallel_size, args.weights)


def _engine_config(args: argparse.Namespace, model: str) -> Any:
    from isthmus.engine.config import EngineConfig  # noqa: PLC0415

    return EngineConfig.build(
        model=model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        kv_cache_dtype=args.kv_cache_dtype,
        page_size=args.page_size,
        pool_bytes=args.pool_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )


def _machine(args: argparse.Namespace) -> Machine:
    from isthmus.sim import calibrate, machine  # noqa: PLC0415
    from isthmus.sim.load import load  # noqa: PLC0415

    start = machine.machine(args.machine)
    if not args.calibrate:
        return start

    def model_of(name: str) -> Any:
        return load(_engine_config(args, name), None).model

    measured = [row for path in args.calibrate for row in calibrate.read_results(path, model_of)]
    files = ", ".join(path.name for path in args.calibrate)
    found = calibrate.fit(start, measured, f"{start.name} (calibrated)", f"fitted to {files}, from {start.name}")
    for row in measured:
        there = calibrate.predicted(found, row)
        print(f"{row.what:<56}{row.seconds:>12.6f} s, fitted {there / row.seconds - 1:+.1%}")
    return found


def _setup(args: argparse.Namespace, loaded: Loaded, machine: Machine) -> Setup:
    from isthmus.engine.config import EngineConfig  # noqa: PLC0415
    from isthmus.sim.simulation import Setup  # noqa: PLC0415

    sizes = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    given = {name: value for name, value in sizes.items() if value is not None}
    config = EngineConfig.build(model=loaded.model.name, **given).on("cpu" if args.machine == "cpu" else "cuda", given)
    return Setup(
        loaded.model,
        machine,
        loaded.arena_bytes,
        config.scheduler,
        prefix_caching=not args.no_enable_prefix_caching,
        snapshots=args.snapshots,
        max_model_len=args.max_model_len,
        page_size=None if any(g.space == "tokens" for g in loaded.model.groups) else args.page_size,
    )


def _sides(
    args: argparse.Namespace, setup: Setup, workload: Workload, limits: Limits
) -> tuple[dict[str, Outcome], dict[str, Any]]:
    from isthmus.sim.compare import Comparison  # noqa: PLC0415

    several = len(setup.model.groups) > 1
    memory = args.memory or ("both" if several and args.static_split is None else "unified")
    if not several and (memory != "unified" or args.static_split is not None):
        raise ConfigError(f"{setup.model.name} has one kind of cache: there is nothing to split")
    if args.phases and len(workload.traces) < 2:
        raise ConfigError("--phases splits for each trace by itself: give --trace at least twice")
    comparison = Comparison(setup, workload, limits, args.search_requests, args.finalists)
    total = comparison.requests(memory, args.phases, args.static_split is not None)
    with _progress(total) as note, _uncollected():
        if memory != "static":
            comparison.unified(note)
        if memory == "both" or (memory == "static" and args.static_split is None):
            if args.phases:
                comparison.phases(note)
            comparison.best(note)
        if args.static_split is not None:
            comparison.given(args.static_split, note)
    return comparison.outcomes, comparison.searches


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal: requests that are over, of all runs."""
    from tqdm import tqdm  # noqa: PLC0415

    with tqdm(total=total, unit=" requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        yield bar.update


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which finds nothing in a run but walks every waiting prompt (6 % of the time)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _result(
    args: argparse.Namespace,
    loaded: Loaded,
    workload: Workload,
    limits: Limits,
    outcomes: Mapping[str, Outcome],
    searches: Mapping[str, Any],
) -> dict[str, Any]:
    from isthmus.sim.summary import summary, timeline  # noqa: PLC0415
    from isthmus.sim.workload import counted  # noqa: PLC0415

    setup = next(iter(outcomes.values())).setup
    requests, prompt, output = counted(workload.arrivals())
    return {
        "model": loaded.model.name,
        "source": loaded.source,
        "machine": dataclasses.asdict(setup.machine),
        "arena_bytes": loaded.arena_bytes,
        "arena_source": loaded.arena_source,
        "groups": [
            {"name": g.name, "kind": g.kind, "page_bytes": g.spec.page_bytes, "page_size": g.spec.page_size,
             "window": g.window} for g in loaded.model.groups
        ],
        "shape": dataclasses.asdict(loaded.model.shape),
        "workload": {
            "traces": list(workload.names), "rate_scale": list(args.rate_scale), "alternate": workload.period,
            "requests": requests, "prompt_tokens": prompt, "output_tokens": output, "seed": args.seed,
        },
        "snapshots": args.snapshots or "branch",
        "limits": {name: value for name, value in dataclasses.asdict(limits).items() if value != float("inf")},
        "sides": {name: summary(outcome, limits) for name, outcome in outcomes.items()},
        "searches": searches,
        "timelines": {name: timeline(outcome) for name, outcome in outcomes.items()},
        "command": sys.argv[1:],
    }  # fmt: skip


def _write(path: Path, result: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result))
    except OSError as error:
        raise ConfigError(f"--json {path}: {(error.strerror or str(error)).lower()}") from error


def _shape(text: str) -> tuple[int, int, int]:
    try:
        count, prompt, output = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,P,O such as 64,8192,256") from None
    if min(count, prompt, output) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a count, a prompt and an output of at least 1 each are due")
    return count, prompt, output


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write seconds, or such as 300s, 5m, 1h")
    return float(match[1]) * _UNITS[match[2]]


def _milliseconds(text: str) -> float:
    return _positive(text) / 1e3


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _snapshots(text: str) -> int | None:
    return None if text == "branch" else _count(text)
