"""Workloads in files. One line is one request; a line that is none is an error that names it.

Mooncake    .jsonl: timestamp (ms), input_length, output_length, hash_ids of blocks of 512 tokens
Azure       .csv: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
any other   .csv or .jsonl: arrival (seconds), input, output and, if it likes, blocks: in a CSV separated by blanks
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.sim.arrivals import Arrival

BLOCK_SIZE = 512
"""Tokens of a block, unless the caller says otherwise: Mooncake's."""

_MICROSECONDS = 26  # characters of a date and time; what comes after is finer than Python's


@dataclass(frozen=True)
class Columns:
    """What a family of files calls things."""

    arrival: str
    seconds: Callable[[Any], float]  # from what stands there
    input: str
    output: str
    blocks: str


def _date(text: Any) -> float:
    stamp = datetime.fromisoformat(str(text)[:_MICROSECONDS])
    return (stamp - datetime(1970, 1, 1, tzinfo=stamp.tzinfo)).total_seconds()


FAMILIES = (
    Columns("timestamp", lambda value: float(value) / 1000, "input_length", "output_length", "hash_ids"),
    Columns("TIMESTAMP", _date, "ContextTokens", "GeneratedTokens", ""),
    Columns("arrival", float, "input", "output", "blocks"),
)


def read(path: Path, *, trace: int = 0, block_size: int = BLOCK_SIZE, limit: int | None = None) -> list[Arrival]:
    """The requests of a file by arrival, the first at 0; `limit`: only so many lines of it.

    ConfigError with file and line for whatever is no request.
    """
    found: list[Arrival] = []
    columns: Columns | None = None
    try:
        for line, row in _rows(path):
            columns = columns or _columns(row, f"{path}:{line}")
            found.append(_arrival(row, columns, f"{path}:{line}", trace, block_size))
            if len(found) == limit:
                break
    except OSError as error:
        raise ConfigError(f"--trace {path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path}: not a text file: {error.reason}") from error
    if not found:
        raise ConfigError(f"--trace {path}: the file has no requests")
    if any(later.at < earlier.at for earlier, later in pairwise(found)):
        found.sort(key=lambda arrival: arrival.at)
    start = found[0].at
    return [Arrival(a.at - start, a.input, a.output, a.blocks, a.block_size, trace) for a in found]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """`(line, fields)` of every line that is not empty."""
    with path.open(newline="") as file:
        if path.suffix.lower() == ".csv":
            reader = csv.DictReader(file, restkey="", restval="")
            for row in reader:
                yield reader.line_num, row
            return
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, Mapping):
                raise ConfigError(f"{path}:{number}: an object a line is due")
            yield number, row


def _columns(row: Mapping[str, Any], where: str) -> Columns:
    for family in FAMILIES:
        if {family.arrival, family.input, family.output} <= set(row):
            return family
    sorts = "; ".join(f"{family.arrival}, {family.input}, {family.output}" for family in FAMILIES)
    raise ConfigError(f"{where}: no fields of a workload: a file has one of these sets: {sorts}")


def _arrival(row: Mapping[str, Any], columns: Columns, where: str, trace: int, block_size: int) -> Arrival:
    try:
        at = columns.seconds(row[columns.arrival])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {columns.arrival} is {row.get(columns.arrival)!r:.40}, not a time") from error
    if not math.isfinite(at):
        raise ConfigError(f"{where}: {columns.arrival} is {at}, not a time")
    prompt = _count(row.get(columns.input), f"{where}: {columns.input}")
    output = _count(row.get(columns.output), f"{where}: {columns.output}")
    blocks = _blocks(row.get(columns.blocks), f"{where}: {columns.blocks}") if columns.blocks else ()
    due = -(-prompt // block_size)
    if blocks and len(blocks) != due:
        raise ConfigError(f"{where}: {len(blocks)} blocks for {prompt:,} tokens: {due} of {block_size} are due")
    return Arrival(at, prompt, output, tuple(blocks), block_size if blocks else 0, trace)


def _count(value: Any, what: str) -> int:
    number = value
    if isinstance(value, str) and value.strip().isdecimal():
        number = int(value)
    if type(number) is not int or number < 1:
        raise ConfigError(f"{what} is {value!r:.40}, not a number of tokens of at least 1")
    return number


def _blocks(value: Any, what: str) -> Sequence[int]:
    if value is None or value == "":
        return ()
    try:
        blocks = [int(block) for block in value.split()] if isinstance(value, str) else value
    except ValueError:
        blocks = None
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ConfigError(f"{what} is {value!r:.40}, not a list of whole numbers")
    return blocks
