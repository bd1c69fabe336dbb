"""lm-eval gives a model the same scores over HTTP as with its own Transformers backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from isthmus.model.demo import demo_folder
from tests.server.running import Server, serve

QUESTIONS = [
    {"question": f"{a} {b}", "choices": [" sat", " the mat", " ä", " cat."], "answer": i % 4}
    for i, (a, b) in enumerate((a, b) for a in ("the cat", "a mat", "Der Bär", "x = ") for b in ("is", "on", "und"))
]


def tasks(folder: Path) -> list[dict[str, Any]]:
    """A multiple-choice and a generation task from one local file."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in QUESTIONS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choice = {
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    made = {
        "task": "tiny_made",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "temperature": 0.0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [common | choice, common | made]


def evaluate(model: Any, folder: Path) -> dict[str, Any]:
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks(folder),
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    found: dict[str, Any] = results
    return found


def check(server: Server, name: str, model: Path, folder: Path, **api_options: Any) -> None:
    """One harness, two ways to the same model, on this machine alone."""
    api = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=name, tokenizer=str(model), tokenizer_backend="huggingface",
        tokenized_requests=True, num_concurrent=4, batch_size=2, max_length=512, **api_options,
    )  # fmt: skip
    direct = HFLM(str(model), dtype="float32", device="cpu", batch_size=1, max_length=512)
    ours, theirs = evaluate(api, folder), evaluate(direct, folder)
    assert set(ours["results"]) == {"tiny_choice", "tiny_made"}
    for task, scores in theirs["results"].items():
        for metric, value in scores.items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value), (task, metric)
    for mine, other in zip(ours["samples"]["tiny_choice"], theirs["samples"]["tiny_choice"], strict=True):
        for (value, is_greedy), (want, want_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(value) == pytest.approx(float(want), abs=1e-3)
            assert str(is_greedy) == str(want_greedy)
    made = [[sample["filtered_resps"] for sample in x["samples"]["tiny_made"]] for x in (ours, theirs)]
    assert made[0] == made[1]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_scores_are_those_of_transformers(server: Server, folder: Path, data: Path) -> None:
    check(server, "tiny", folder, data)


@pytest.mark.slow
def test_the_scores_of_the_demo_model_are_those_of_transformers(data: Path) -> None:
    with serve("demo", data, "--dtype", "float32", "--pool-bytes", "128m", "--max-model-len", "512") as server:
        # The tokenizer begins texts with a token, which this side of the harness leaves out unless it is told.
        check(server, "demo", demo_folder(), data, add_bos_token=True)
