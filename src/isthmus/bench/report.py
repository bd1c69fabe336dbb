"""How a bench shows its result: one JSON object with where it ran, or lines for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from isthmus import env

Result = dict[str, Any]


def show(result: Result, as_json: bool, lines: Callable[[Result], Iterable[str]]) -> None:
    """Print a result. JSON carries the command and the environment, so that a file of it stands alone."""
    if as_json:
        print(json.dumps(result | {"command": sys.argv[1:], "environment": env.describe()}))
        return
    for line in lines(result):
        print(line)
