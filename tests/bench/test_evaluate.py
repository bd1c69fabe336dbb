"""GSM8K: what the model is asked, and which number counts as its answer."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from isthmus.bench.evaluate import STOP, Question, correct, final_number, read_questions
from isthmus.errors import ConfigError
from tests.conftest import shared_file


def test_questions_stand_behind_solved_examples() -> None:
    questions = read_questions(shared_file("gsm8k_test.jsonl"), 5, 200)
    assert len(questions) == 200
    first = questions[0]
    assert first.prompt.startswith("Question: Janet\u2019s ducks lay 16 eggs")
    assert first.prompt.count("#### ") == 5
    assert first.prompt.count(STOP) == 5
    assert first.prompt.endswith("How much does he need to pay for them?\nAnswer:")
    assert first.target == 64
    shots = first.prompt[: first.prompt.rindex("Question:")]
    assert all(question.prompt.startswith(shots) for question in questions)


def test_every_item_of_the_file_has_a_number() -> None:
    assert len(read_questions(shared_file("gsm8k_test.jsonl"), 0, 1319)) == 1319


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 = 13\n#### 1,234", "1234"),
        ("#### $18.50 a day", "18.5"),
        ("#### -3", "-3"),
        ("#### 7\n#### 8", "7"),
        ("she has 2 and 3, so $5.", "5"),
        ("#### nothing, or 12", "12"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_an_answer_is_right_by_its_value() -> None:
    questions = [Question("", Decimal(18)), Question("", Decimal(18)), Question("", Decimal(1))]
    assert correct(["#### 18.00", "#### 19", "silence"], questions) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is no object with question and answer"),
        ('{"question": "a"}', "line 1 is no object with question and answer"),
        ('{"question": 1, "answer": "#### 1"}', "line 1: question and answer must be text"),
        ('{"question": "a", "answer": "one"}', "an answer does not end in #### and a number: 'one'"),
        ("", "0 shots and 1 questions are due, the file has 0 items"),
    ],
)
def test_a_file_that_is_not_gsm8k(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--data") as caught:
        read_questions(path, 0, 1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "a\u2028b", "answer": "#### 1"}, ensure_ascii=False) + "\n")
    assert "a\u2028b" in read_questions(path, 0, 1)[0].prompt
