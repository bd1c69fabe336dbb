"""The command `isthmus`: one verb per job. Torch is imported by the verbs that need it, so `--help` is instant."""

from __future__ import annotations

import time

STARTED = time.perf_counter()  # read by `bench throughput`, whose start-up figure includes the imports below

import argparse  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import io  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from isthmus import __version__, top  # noqa: E402
from isthmus.chat import verb as chat  # noqa: E402
from isthmus.errors import ConfigError, IsthmusError  # noqa: E402
from isthmus.evaluate import verb as evaluate  # noqa: E402
from isthmus.flags import Parser, add_engine_flags, add_sampling_flags  # noqa: E402
from isthmus.plan import verb as plan  # noqa: E402
from isthmus.replay import verb as replay  # noqa: E402
from isthmus.server.config import ServerConfig  # noqa: E402
from isthmus.sim import verb as simulate  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Exit codes: 0 done, 1 the job itself failed, 2 bad input, 130 interrupted."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model says what the terminal's encoding may lack
    try:
        code: int = args.run(args)
    except IsthmusError as error:
        print(f"isthmus: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isthmus: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: not worth a word, and nothing may be written to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> Parser:
    parser = Parser(prog="isthmus", description="Serve hybrid language models from one arena of memory.")
    parser.add_argument("--version", action="version", version=f"isthmus {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    _add_generate(verbs)
    _add_serve(verbs)
    chat.add_parser(verbs)
    plan.add_parser(verbs)
    replay.add_parser(verbs)
    simulate.add_parser(verbs)
    _add_bench(verbs)
    evaluate.add_parser(verbs)
    top.add_parser(verbs)
    env = verbs.add_parser("env", help="print versions, processor and memory, for bug reports")
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(run=_env)
    return parser


def _add_generate(verbs: argparse._SubParsersAction[Parser]) -> None:
    parser = verbs.add_parser("generate", help="complete prompts and print the text")
    add_engine_flags(parser)
    group = parser.add_argument_group("prompts (one of these; default: standard input, one prompt)")
    group.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeatable")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line, or .jsonl with prompt, prompt_file or prompt_token_ids, and max_tokens",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object a request instead of text")
    output.add_argument("--map", action="store_true", help="end with the arena in bytes, at its fullest step")
    output.add_argument("--compare-static", action="store_true", help="run the batch again under the best static split")
    add_sampling_flags(parser.add_argument_group("sampling"), max_tokens=64)  # type: ignore[arg-type]
    parser.set_defaults(run=_generate)


def _add_serve(verbs: argparse._SubParsersAction[Parser]) -> None:
    parser = verbs.add_parser("serve", help="serve the model over HTTP with OpenAI's API")
    add_engine_flags(parser, ServerConfig)
    parser.set_defaults(run=_serve)


def _add_bench(verbs: argparse._SubParsersAction[Parser]) -> None:
    bench = verbs.add_parser("bench", help="measure (throughput, serve, split ...) and try (fuzz): see bench --help")
    kinds = bench.add_subparsers(title="benches", metavar="BENCH", required=True, parser_class=Parser)
    memory = kinds.add_parser("memory", help="microseconds the memory core takes per step")
    memory.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    memory.set_defaults(run=_bench_memory)
    _add_bench_throughput(kinds)
    _add_bench_step(kinds)
    _add_bench_prefill(kinds)
    _add_bench_kernels(kinds)
    split = kinds.add_parser("split", help="unified against static memory at its best split and at wrong ones")
    add_engine_flags(split)
    split.add_argument(
        "--long", type=_shape, default=(2, 8192, 64), metavar="N,P,O", help="long requests (default 2,8192,64)"
    )
    split.add_argument(
        "--short", type=_shape, default=(62, 96, 64), metavar="N,P,O", help="short ones (default 62,96,64)"
    )
    split.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each, in turn; the median counts")
    split.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    split.set_defaults(run=_bench_split)
    _add_bench_serve(kinds)
    chats = kinds.add_parser("chats", help="multi-turn chats with the prefix cache and without")
    add_engine_flags(chats)
    _add_chats(chats)
    chats.add_argument("--json", action="store_true", help="one JSON object")
    chats.set_defaults(run=_bench_chats)
    soak = kinds.add_parser("soak", help="a server under clients that come, stay and vanish")
    add_engine_flags(soak)
    soak.add_argument("--minutes", type=float, default=0, metavar="M", help="go on for so long (an hour is a soak)")
    soak.add_argument("--rounds", type=int, default=10, metavar="N", help="at least so many (default %(default)s)")
    soak.add_argument("--concurrency", type=int, default=256, metavar="N", help="streams at once (default %(default)s)")
    soak.add_argument("--hang-up", type=float, default=0.1, metavar="P", help="share that vanish (default %(default)s)")
    soak.add_argument("--prompt-len", type=int, default=48, metavar="N", help="mean (default %(default)s)")
    soak.add_argument("--output-len", type=int, default=24, metavar="N", help="mean (default %(default)s)")
    soak.add_argument("--seed", type=int, default=0, help="of lengths and hang-ups (default %(default)s)")
    soak.add_argument("--json", action="store_true", help="one JSON object")
    soak.set_defaults(run=_bench_soak)
    _add_bench_ab(kinds)
    _add_bench_fuzz(kinds)
    _add_bench_squeeze(kinds)
    _add_bench_snapshots(kinds)
    for parser in kinds.choices.values():
        parser.set_defaults(run=functools.partial(_bench, parser.get_default("run")))


def _add_bench_throughput(kinds: argparse._SubParsersAction[Parser]) -> None:
    throughput = kinds.add_parser("throughput", help="tokens per second of a model on a workload")
    add_engine_flags(throughput)
    workload = throughput.add_mutually_exclusive_group(required=True)
    workload.add_argument("--workload", type=Path, metavar="FILE", help="JSON with prompts of token ids")
    workload.add_argument(
        "--synthetic", type=_shape, action="append", metavar="N,P,O",
        help="N requests of P random tokens, O to generate; repeatable, all of them shuffled",
    )  # fmt: skip
    throughput.add_argument("--limit", type=int, metavar="N", help="only the first N requests (1: a single stream)")
    throughput.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="tokens of each --workload request (default 128)"
    )
    throughput.add_argument(
        "--against-static", action="store_true", help="unified memory and the best walls for this workload in turn"
    )
    throughput.add_argument(
        "--by-step",
        action="store_true",
        help="also where the time goes, by kind of step, and a run of median steps; this takes some itself",
    )
    throughput.add_argument("--repeat", type=int, default=3, metavar="N", help="runs; the median counts (default 3)")
    throughput.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    throughput.set_defaults(run=_bench_throughput)


def _add_bench_step(kinds: argparse._SubParsersAction[Parser]) -> None:
    step = kinds.add_parser("step", help="decode steps: host and GPU time by part, against the bytes they must read")
    add_engine_flags(step)
    step.add_argument(
        "--batch", type=_counts, default=(1, 64, 256), metavar="N,N", help="sequences at once (default 1,64,256)"
    )
    step.add_argument("--context", type=int, default=512, metavar="N", help="prompt tokens of each (default 512)")
    step.add_argument("--steps", type=int, default=50, metavar="N", help="measured at each size (default 50)")
    step.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    step.set_defaults(run=_bench_step)


def _add_bench_prefill(kinds: argparse._SubParsersAction[Parser]) -> None:
    prefill = kinds.add_parser("prefill", help="prompts alone: GPU time by part, against what must be computed")
    add_engine_flags(prefill)
    prefill.add_argument(
        "--prompts", type=_prompts, action="append", metavar="N,P",
        help="N prompts of P random tokens at once; repeatable (default 16,512 and 1,8192)",
    )  # fmt: skip
    prefill.add_argument("--repeat", type=int, default=5, metavar="N", help="batches of each; the median counts")
    prefill.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    prefill.set_defaults(run=_bench_prefill)


def _add_bench_kernels(kinds: argparse._SubParsersAction[Parser]) -> None:
    kernels = kinds.add_parser("kernels", help="GPU kernels against the copy and matmul rates of the same run")
    kernels.add_argument(
        "--only", type=lambda text: tuple(text.split(",")), metavar="S,S", help="only these sections; default: all"
    )
    kernels.add_argument("--sweep", action="store_true", help="try other builds of the attention kernels instead")
    kernels.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    kernels.set_defaults(run=_bench_kernels)


def _add_bench_ab(kinds: argparse._SubParsersAction[Parser]) -> None:
    ab = kinds.add_parser("ab", help="servers with static and unified memory: the same questions, the same answers?")
    add_engine_flags(ab)
    ab.add_argument("--task", choices=("gsm8k",), default="gsm8k", help="what is asked (default %(default)s)")
    ab.add_argument(
        "--data", type=Path, default="../shared/data/gsm8k_test.jsonl", metavar="FILE",
        help="GSM8K's test.jsonl (default %(default)s)",
    )  # fmt: skip
    for flag, default, text in (
        ("--rounds", 6, "times that each server gets all questions"), ("--questions", 200, "in a round"),
        ("--shots", 5, "solved examples before each question"), ("--concurrency", 128, "requests under way"),
        ("--output-len", 256, "most tokens of an answer"), ("--repeat", 1, "servers of each side, order alternating"),
    ):  # fmt: skip
        ab.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")
    ab.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    ab.add_argument("--server-command", help=argparse.SUPPRESS)  # instead of this isthmus, for tests
    ab.set_defaults(run=_bench_ab)


def _add_bench_fuzz(kinds: argparse._SubParsersAction[Parser]) -> None:
    fuzz = kinds.add_parser("fuzz", help="the real scheduler in random worlds, all of it checked at every turn")
    fuzz.add_argument(
        "--worlds", type=int, metavar="N", help="how many (default 1000; 1 with --seed, no limit with --minutes)"
    )
    fuzz.add_argument("--seed", type=int, metavar="S", help="of the first; the others follow (default 0)")
    fuzz.add_argument("--minutes", type=float, metavar="M", help="begin no world after so long")
    fuzz.add_argument("--json", action="store_true", help="one JSON object")
    fuzz.set_defaults(run=_bench_fuzz)


def _add_bench_snapshots(kinds: argparse._SubParsersAction[Parser]) -> None:
    snapshots = kinds.add_parser(
        "snapshots", help="where states are saved: hit rates in multi-turn chats, no model run"
    )
    add_engine_flags(snapshots)
    _add_chats(snapshots)
    snapshots.add_argument(
        "--intervals", type=_counts, default=(64, 256, 512, 2048), metavar="N,N",
        help="fixed ones to compare with, in tokens (default 64,256,512,2048)",
    )  # fmt: skip
    snapshots.add_argument("--json", action="store_true", help="one JSON object")
    snapshots.set_defaults(run=_bench_snapshots)


def _add_chats(parser: Parser) -> None:
    for flag, default, text in (
        ("--conversations", 8, "at once"), ("--turns", 10, "of each"), ("--system", 512, "shared tokens"),
        ("--user", 48, "new tokens a turn"), ("--answer", 48, "tokens of each answer"),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")


def _add_bench_squeeze(kinds: argparse._SubParsersAction[Parser]) -> None:
    squeeze = kinds.add_parser("squeeze", help="three kinds in one arena, the float squeezed from both sides")
    squeeze.add_argument("--steps", type=int, default=100_000, metavar="N", help="how many (default %(default)s)")
    squeeze.add_argument("--seed", type=int, default=0, help="of the load (default %(default)s)")
    squeeze.add_argument("--enable-prefix-caching", action="store_true", help="keep what has ended until it is evicted")
    squeeze.add_argument("--json", action="store_true", help="one JSON object with raw samples")
    squeeze.set_defaults(run=_bench_squeeze)


def _add_bench_serve(kinds: argparse._SubParsersAction[Parser]) -> None:
    serve = kinds.add_parser("serve", help="latency and throughput of a running server")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="where it listens (default %(default)s)")
    serve.add_argument("--served-model-name", metavar="NAME", help="default: the first model it offers")
    serve.add_argument("--api-key", metavar="KEY", help="default: ISTHMUS_API_KEY")
    serve.add_argument("--rate", type=float, metavar="R", help="open loop: requests a second, at random moments")
    serve.add_argument("--concurrency", type=int, metavar="N", help="closed loop: requests under way at all times")
    serve.add_argument("--requests", type=int, default=64, metavar="N", help="how many (default %(default)s)")
    serve.add_argument(
        "--prompt-len", type=int, default=256, metavar="N", help="mean prompt tokens (default %(default)s)"
    )
    serve.add_argument(
        "--output-len", type=int, default=64, metavar="N", help="mean output tokens (default %(default)s)"
    )
    serve.add_argument("--workload", type=Path, metavar="FILE", help="prompts of token ids instead, --output-len exact")
    serve.add_argument("--hang-up", type=float, default=0.0, metavar="P", help="share of clients that vanish midway")
    serve.add_argument("--ttft-limit", type=float, metavar="MS", help="goodput counts requests that kept it")
    serve.add_argument("--itl-limit", type=float, metavar="MS", help="likewise, the mean of a request")
    serve.add_argument("--seed", type=int, default=0, help="of lengths and hang-ups (default %(default)s)")
    serve.add_argument("--json", action="store_true", help="one JSON object")
    serve.set_defaults(run=_bench_serve)


def _shape(text: str) -> tuple[int, int, int]:
    try:
        count, prompt, output = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not count,prompt,output such as 4,3072,64") from None
    return count, prompt, output


def _prompts(text: str) -> tuple[int, int]:
    try:
        count, tokens = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not count,tokens such as 16,512") from None
    return count, tokens


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,64,256") from None


def _generate(args: argparse.Namespace) -> int:
    from isthmus import generate  # noqa: PLC0415

    return generate.run(args)


def _serve(args: argparse.Namespace) -> int:
    with _needing("serve", "serve"):
        from isthmus.server import serve  # noqa: PLC0415
    return serve.run(args)


def _env(args: argparse.Namespace) -> int:
    from isthmus import env  # noqa: PLC0415

    return env.run(args.json)


def _bench(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """A bench whose MODEL may be a shape."""
    if not hasattr(args, "config"):  # no settings of an engine
        return run(args)
    from isthmus.bench import shapes  # noqa: PLC0415

    with shapes.as_model(args):
        return run(args)


def _bench_memory(args: argparse.Namespace) -> int:
    from isthmus.bench import memory, report  # noqa: PLC0415

    report.show(memory.run(), args.json, memory.lines)
    return 0


@contextlib.contextmanager
def _needing(verb: str, extras: str) -> Iterator[None]:
    """Import what a verb needs; ConfigError says how to get a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "isthmus":
            raise  # a fault of ours, not a package to install
        raise ConfigError(f"{verb} needs the package {error.name}: pip install 'isthmus[{extras}]'") from error


def _bench_throughput(args: argparse.Namespace) -> int:
    from isthmus.bench import report, throughput  # noqa: PLC0415

    report.show(throughput.run(args, STARTED), args.json, throughput.lines)
    return 0


def _bench_step(args: argparse.Namespace) -> int:
    from isthmus.bench import report, step  # noqa: PLC0415

    report.show(step.run(args), args.json, step.lines)
    return 0


def _bench_prefill(args: argparse.Namespace) -> int:
    from isthmus.bench import prefill, report  # noqa: PLC0415

    report.show(prefill.run(args), args.json, prefill.lines)
    return 0


def _bench_kernels(args: argparse.Namespace) -> int:
    from isthmus.bench import kernels, report  # noqa: PLC0415

    result = kernels.run(args)
    report.show(result, args.json, kernels.lines)
    return 1 if result["failed"] else 0


def _bench_split(args: argparse.Namespace) -> int:
    from isthmus.bench import report, split  # noqa: PLC0415

    report.show(split.run(args), args.json, split.lines)
    return 0


def _bench_serve(args: argparse.Namespace) -> int:
    with _needing("bench serve", "bench"):
        from isthmus.bench import report, serve  # noqa: PLC0415
    result = serve.run(args)
    report.show(result, args.json, serve.lines)
    return 1 if result["failed"] else 0


def _bench_chats(args: argparse.Namespace) -> int:
    from isthmus.bench import chats, report  # noqa: PLC0415

    report.show(chats.run(args), args.json, chats.lines)
    return 0


def _bench_soak(args: argparse.Namespace) -> int:
    with _needing("bench soak", "bench,serve"):
        from isthmus.bench import report, soak  # noqa: PLC0415
    result = soak.run(args)
    report.show(result, args.json, soak.lines)
    return 1 if result["failed"] or result["live_bytes_left"] else 0


def _bench_ab(args: argparse.Namespace) -> int:
    with _needing("bench ab", "bench,serve"):
        from isthmus.bench import ab, report  # noqa: PLC0415
    result = ab.run(args)
    report.show(result, args.json, ab.lines)
    return 1 if ab.failed(result) else 0


def _bench_fuzz(args: argparse.Namespace) -> int:
    from isthmus.bench import report  # noqa: PLC0415
    from isthmus.sim import fuzz  # noqa: PLC0415

    result = fuzz.run(args.worlds, args.seed, args.minutes)
    report.show(result, args.json, fuzz.lines)
    return 1 if result["failures"] else 130 if result["interrupted"] else 0


def _bench_snapshots(args: argparse.Namespace) -> int:
    from isthmus.bench import report, snapshots  # noqa: PLC0415

    report.show(snapshots.run(args), args.json, snapshots.lines)
    return 0


def _bench_squeeze(args: argparse.Namespace) -> int:
    from isthmus.bench import report, squeeze  # noqa: PLC0415

    report.show(squeeze.run(args.steps, args.seed, prefix_caching=args.enable_prefix_caching), args.json, squeeze.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
