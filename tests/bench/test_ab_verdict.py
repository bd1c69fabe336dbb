"""The sides of an A/B differ by rounding only as often as static memory differs from itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.bench.ab import Answers, compare, failed, lines
from isthmus.bench.replies import Reply

QUESTIONS, ROUNDS = 200, 6


def answers(wavering: float, faulty: float = 0.0, rounds: int = ROUNDS) -> Answers:
    """A share of answers falls one way or another; of unified memory's, a share more is wrong after the first round."""
    rng = np.random.default_rng(7)
    found: Answers = {}
    for side in ("static", "unified"):
        for turn in range(1, rounds + 1):
            other = rng.random(QUESTIONS) < wavering
            wrong = (rng.random(QUESTIONS) < faulty) & (side == "unified") & (turn > 1)
            texts = np.where(wrong, "wrong", np.where(other, [f"{n}" for n in rng.integers(0, 9, QUESTIONS)], "one"))
            found[1, side, turn] = [Reply(str(text), 1, "stop") for text in texts]
    return found


def verdict(found: Answers) -> str:
    result: dict[str, Any] = {"alive": {"static": True, "unified": True}, "agreement": compare(found)}
    assert failed(result) == (result["agreement"]["verdict"] not in ("agree", "rounding"))
    return str(result["agreement"]["verdict"])


def test_sides_that_agree() -> None:
    assert verdict(answers(0.0)) == "agree"


@pytest.mark.parametrize("wavering", [0.02, 0.2, 0.5])
def test_as_often_as_static_from_itself_is_rounding(wavering: float) -> None:
    assert verdict(answers(wavering)) == "rounding"


@pytest.mark.parametrize(("wavering", "faulty"), [(0.02, 0.1), (0.2, 0.2), (0.5, 0.4)])
def test_more_often_is_not(wavering: float, faulty: float) -> None:
    assert verdict(answers(wavering, faulty)) == "differ"


def test_one_difference_where_static_is_steady_is_a_fault() -> None:
    found = answers(0.0)
    found[1, "unified", 4][17] = Reply("another", 1, "stop")
    assert verdict(found) == "differ"


def test_one_round_has_no_control() -> None:
    assert verdict(answers(0.2, rounds=1)) == "differ"


def test_nothing_is_told_where_static_answers_everything_otherwise() -> None:
    rng = np.random.default_rng(7)
    found = {key: [Reply(str(rng.random()), 1, "stop") for _ in replies] for key, replies in answers(0.0).items()}
    assert verdict(found) == "blind"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (answers(0.0), "the sides agree"),
        (answers(0.2), "this is rounding"),
        (answers(0.2, 0.3), "differ more than static does from itself"),
        (answers(0.2, rounds=1), "this is not rounding"),
    ],
)
def test_the_verdict_in_words(found: Answers, words: str) -> None:
    load = {"questions": QUESTIONS, "shots": 5, "concurrency": 8, "output_len": 9}
    run: dict[str, Any] = {"task": "gsm8k", "model": "demo", "load": load, "servers": [], "samples": []}
    run |= {"unified_over_static": None, "agreement": compare(found)}
    assert words in list(lines(run))[-1]
