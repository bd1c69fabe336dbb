"""What a plan is asked for: requests as `(prompt, output)` lengths, from `N,P,O` or a file of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError

PROMPT = ("input_length", "input", "prompt_len", "ContextTokens", "prompt", "prompts")
OUTPUT = ("output_length", "output", "output_len", "GeneratedTokens", "max_tokens")
"""Names of the two columns, in a CSV header or a JSON line; those of the Mooncake and Azure traces are among them."""


@dataclass(frozen=True)
class Workload:
    """Requests that are all there from the start."""

    text: str  # as it was asked for
    lengths: tuple[tuple[int, int], ...]  # (prompt, output) tokens
    left_out: int = 0  # requests of the file that are longer than the model takes

    def within(self, max_model_len: int) -> Workload:
        """Without what is longer. ConfigError if nothing is left."""
        kept = tuple((p, o) for p, o in self.lengths if p + o <= max_model_len)
        if not kept:
            raise ConfigError(
                f"--workload {self.text}: every request is longer than a sequence can be, {max_model_len:,} tokens"
            )
        return Workload(self.text, kept, len(self.lengths) - len(kept))


def read(asked: Sequence[str], limit: int) -> Workload:
    """All the requests of several `--workload`: `N,P,O`, or the first `limit` of a CSV or JSONL file, dealt evenly.

    ConfigError naming what is wrong, with the line of a file.
    """
    batches = [_shape(text) or _file(Path(text), limit) for text in asked]
    return Workload(" ".join(asked), tuple(_dealt(batches)))


def _dealt(batches: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """Of several batches, each spread over the whole: long requests among the short ones, always in the same order."""
    places = [((i + 0.5) / len(batch), b, i) for b, batch in enumerate(batches) for i in range(len(batch))]
    for _, batch, i in sorted(places):
        yield batches[batch][i]


def _shape(text: str) -> list[tuple[int, int]] | None:
    """The requests of `N,P,O`; None if it is something else."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        return None
    count, prompt, output = (int(part) for part in parts)
    if min(count, prompt, output) < 1:
        raise ConfigError(f"--workload {text}: a count, a prompt and an output of at least 1 each are due")
    return [(prompt, output)] * count


def _file(path: Path, limit: int) -> list[tuple[int, int]]:
    if not path.is_file():
        raise ConfigError(f"--workload {path}: neither N,P,O such as 64,8192,256 nor a file")
    rows: list[tuple[int, int]] = []
    with path.open(newline="") as lines:
        for number, row in enumerate(_rows(path, lines), 1):
            if len(rows) == limit:
                break
            rows.append(_lengths(path, number, row))
    if not rows:
        raise ConfigError(f"--workload {path}: holds no request")
    return rows


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".csv":
        yield from csv.DictReader(lines)
        return
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ConfigError(f"--workload {path}: line {number} is not JSON; a .csv or .jsonl file is due") from None
        if not isinstance(row, dict):
            raise ConfigError(f"--workload {path}: line {number} is not a JSON object")
        yield row


def _lengths(path: Path, number: int, row: Mapping[str, Any]) -> tuple[int, int]:
    found = []
    for names in (PROMPT, OUTPUT):
        name = next((name for name in names if row.get(name) not in (None, "")), None)
        if name is None:
            raise ConfigError(f"--workload {path}: request {number} has none of the columns {', '.join(names)}")
        try:
            found.append(int(row[name]))
        except (TypeError, ValueError):
            raise ConfigError(
                f"--workload {path}: request {number}: {name} is {row[name]!r:.40}, not a count"
            ) from None
    prompt, output = found
    if prompt < 1:
        raise ConfigError(f"--workload {path}: request {number} has a prompt of {prompt} tokens, not at least 1")
    return prompt, max(1, output)
