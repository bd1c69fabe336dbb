"""GSM8K, few-shot: prompts from the data file, the number in an answer, and how many are right.

The file is the dataset's own: one JSON object a line with `question` and `answer`, whose last line is `#### number`
(Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021, arXiv 2110.14168).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from isthmus.errors import ConfigError

STOP = "\nQuestion:"
"""Where the model goes on to a question of its own."""

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_FINAL = re.compile(rf"####\s*({_NUMBER})")


@dataclass(frozen=True)
class Question:
    """One question as the model gets it, and what is right."""

    prompt: str  # the shots, then the question
    target: Decimal


def read_questions(path: Path, shots: int, count: int) -> list[Question]:
    """`count` questions, each behind the file's first `shots` items with their answers.

    ConfigError for a file that is missing, is not GSM8K, or is too short.
    """
    items = _items(path)
    if len(items) < shots + count:
        raise ConfigError(
            f"--data {path}: {shots} shots and {count} questions are due, the file has {len(items)} items: "
            "lower --questions"
        )
    examples = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in items[:shots])
    return [
        Question(f"{examples}Question: {question}\nAnswer:", _target(path, answer))
        for question, answer in items[shots : shots + count]
    ]


def final_number(text: str) -> Decimal | None:
    """The number after the first `####`, else the last number; None where there is none."""
    marked = _FINAL.search(text)
    found = marked[1] if marked else next(iter(re.findall(_NUMBER, text)[::-1]), None)
    return None if found is None else Decimal(found.replace(",", "").replace("$", ""))


def correct(texts: Sequence[str], questions: Sequence[Question]) -> int:
    """How many answers end in the right number."""
    return sum(final_number(text) == question.target for text, question in zip(texts, questions, strict=True))


def _items(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text().split("\n")
    except OSError as error:
        raise ConfigError(
            f"--data {path}: {(error.strerror or str(error)).lower()}: name GSM8K's test file "
            "(grade_school_math/data/test.jsonl of github.com/openai/grade-school-math)"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--data {path}: not text: {error}") from error
    return [_item(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _item(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        data = json.loads(line)
        question, answer = data["question"], data["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--data {path}: line {number} is no object with question and answer") from error
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(f"--data {path}: line {number}: question and answer must be text")
    return question, answer


def _target(path: Path, answer: str) -> Decimal:
    marked = _FINAL.search(answer)
    if marked is None:
        raise ConfigError(f"--data {path}: an answer does not end in #### and a number: {answer[-40:]!r}")
    return Decimal(marked[1].replace(",", "").replace("$", ""))
