"""How a bench shows its result: one JSON object with where it ran, or lines for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from isthmus import env

Result = dict[str, Any]


def show(result: Result, as_json: bool, lines: Callable[[Result], Iterable[str]]) -> None:
    """Print a result. JSON carries the command and the environment, so that a file of it stands alone."""
    if as_json:
        print(json.dumps(result | {"command": [*_shown(sys.argv[1:])], "environment": env.describe()}))
        return
    for line in lines(result):
        print(line)


def _shown(arguments: Sequence[str]) -> Iterator[str]:
    """Arguments as anybody may read them: without the key."""
    before = ""
    for each in arguments:
        masked = "--api-key=..." if each.startswith("--api-key=") else each
        yield "..." if before == "--api-key" else masked
        before = each
