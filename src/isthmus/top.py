"""`isthmus top`: a running server's arena and requests in a terminal, from the stream that the dashboard reads."""

from __future__ import annotations

import argparse
import os
import sys

from isthmus.errors import ConfigError
from isthmus.flags import Parser


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    """The verb and its flags."""
    parser = verbs.add_parser("top", help="watch a running server: its arena, its requests, its counters")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where it listens (default %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="default: ISTHMUS_API_KEY")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (default %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show frames until interrupted. ConfigError for a server that is not there or does not let us in."""
    from isthmus import top_screen, top_stream  # noqa: PLC0415 (rich and urllib: not for `isthmus --help`)

    if not args.interval > 0:
        raise ConfigError(f"--interval {args.interval:g}: give seconds greater than 0")
    url, key = args.url.rstrip("/"), args.api_key or os.environ.get("ISTHMUS_API_KEY")
    screen = top_screen.Screen(sys.stdout, live=not args.once)
    if args.once:
        screen.show(*top_stream.two(top_stream.frames(url, key)))
        return 0
    with screen:
        for before, frame in top_stream.pairs(top_stream.watch(url, key), args.interval):
            screen.show(before, frame)
    return 0
