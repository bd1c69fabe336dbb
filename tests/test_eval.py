"""`isthmus eval`: the harness' scores are those of its own backend, and one line says what cannot be evaluated."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from isthmus.bench import report
from isthmus.errors import ConfigError, ModelError
from isthmus.evaluate import tasks as evaluate_tasks
from isthmus.evaluate.engine import EngineLM
from isthmus.llm import LLM
from isthmus.model.demo import demo_folder
from tests import command
from tests.server.tiny_model import write_tiny_model

SMALL = {"dtype": "float32", "pool_bytes": 1 << 20, "page_size": 4}
CONTEXT = 66
TASKS = ("tiny_choice", "tiny_made", "tiny_rolling")

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"{a} {b}", "choices": [" sat", " the mat", " ä", " cat."], "answer": i % 4, "long": f"{a} {b} " * 40}
    for i, (a, b) in enumerate((a, b) for a in ("the cat", "Der Bär", "x = ") for b in ("is", "on"))
]


def write_tasks(folder: Path, **changes: Any) -> Path:
    """Three tasks over one local file, one for each kind of request; `changes` to all of them."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in QUESTIONS))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    kinds: dict[str, dict[str, Any]] = {
        "tiny_choice": {
            "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
            "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "tiny_made": {
            "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{long}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }  # fmt: skip
    made = folder / "tasks"
    made.mkdir()
    for name, kind in kinds.items():
        (made / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | common | kind | changes))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer begins texts with a token of its own."""
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "beginning")
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    begin = ("<eos>", plain.token_to_id("<eos>"))
    plain.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[begin])
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", bos_token="<eos>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> EngineLM:
    return EngineLM(LLM(str(folder), max_model_len=CONTEXT, **SMALL))


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "isthmus"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


def run(*args: object) -> int:
    return command.run("eval", *args)


def flags(**settings: Any) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def requests(kind: str, *args: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(args)]


@pytest.mark.parametrize("name", ["folder", "beginning"])
def test_the_scores_are_those_of_the_harness_own_backend(
    name: str, request: pytest.FixtureRequest, tasks: Path
) -> None:
    check(request.getfixturevalue(name), tasks)


@pytest.mark.slow
def test_the_scores_of_the_demo_model_are_those_of_the_harness_own_backend(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ISTHMUS_CACHE")
    check(demo_folder(), tasks)


def check(model: Path, tasks: Path) -> None:
    """The same questions to both, all three kinds of requests; the last ones longer than the context."""
    ours = EngineLM(LLM(str(model), max_model_len=CONTEXT, **SMALL | {"pool_bytes": 64 << 20}))
    theirs = HFLM(str(model), dtype="float32", device="cpu", batch_size=1, max_length=CONTEXT - 2)
    found = [
        evaluate_tasks.evaluate(each, evaluate_tasks.find(TASKS, tasks), num_fewshot=0, samples=True)
        for each in (ours, theirs)
    ]
    for task in TASKS:
        pairs = zip(*(result["samples"][task] for result in found), strict=True)
        for mine, other in pairs:
            assert _numbers(mine["resps"]) == pytest.approx(_numbers(other["resps"]), abs=1e-3, rel=1e-4)
            assert _texts(mine["resps"]) == _texts(other["resps"])
        scores, expected = (_scores(result["results"][task]) for result in found)
        assert scores == pytest.approx(expected, rel=1e-4)
    assert len(ours.tok_encode(QUESTIONS[0]["long"])) > 1.5 * CONTEXT, "so that texts are scored in windows"


def test_no_text_begins_with_the_same_token_twice(beginning: Path) -> None:
    model = EngineLM(LLM(str(beginning), **SMALL))
    assert model.tok_encode("the cat")[0] == model.prefix_token_id
    assert model.tok_encode("<eos>the cat") == model.tok_encode("the cat")
    assert model.tok_encode("the cat", add_special_tokens=False) == model.tok_encode("the cat")[1:]


def _scores(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if isinstance(value, float)}


def _numbers(responses: Any) -> list[float]:
    return [x for part in _flat(responses) if (x := _number(part)) is not None]


def _texts(responses: Any) -> list[str]:
    return [str(part) for part in _flat(responses) if _number(part) is None]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _flat(value: Any) -> list[Any]:
    return [x for part in value for x in _flat(part)] if isinstance(value, list) else [value]


def test_the_verb_prints_the_table_and_writes_what_the_other_benches_do(
    folder: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    args = ("--include-path", tasks, "--limit", 3, "--num-fewshot", 1, *flags(**SMALL))
    assert run(folder, "--tasks", "tiny_choice,tiny_made", *args, "--output", file, "--log-samples") == 0
    table = capsys.readouterr().out
    assert "limit 3, num_fewshot 1" in table
    assert "|tiny_choice|" in table
    assert "|exact_match|" in table
    result = json.loads(file.read_text())
    assert result["n-samples"]["tiny_choice"] == {"original": 6, "effective": 3}
    assert result["n-shot"] == {"tiny_choice": 1, "tiny_made": 1}
    assert result["lm_eval"] == evaluate_tasks.VERSION
    assert result["environment"]["packages"]["isthmus"]
    assert "\n\n" in result["samples"]["tiny_made"][0]["arguments"][0][0], "an example stands before the question"

    assert run(folder, "--tasks", "tiny_made", *args, "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"]["tiny_made"].keys() >= {"exact_match,none"}


def test_the_chat_template_is_used_when_asked_for(
    folder: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--include-path", tasks, "--limit", 1, *flags(**SMALL), "--json", "--log-samples")
    assert run(folder, "--tasks", "tiny_made", *args, "--apply-chat-template") == 0
    [sample] = json.loads(capsys.readouterr().out)["samples"]["tiny_made"]
    assert sample["arguments"][0][0] == "<eos>user:the cat is<eos>assistant:"


def test_long_contexts_lose_their_beginnings(
    ours: EngineLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[list[int]] = []
    generate = ours._llm.generate

    def note(prompts: Any, *args: Any, **options: Any) -> Any:
        asked.extend(prompt["prompt_token_ids"] for prompt in prompts)
        return generate(prompts, *args, **options)

    monkeypatch.setattr(ours._llm, "generate", note)
    text = "the cat is on the mat " * 10
    ours.generate_until(requests("generate_until", (text, {"max_gen_toks": 6}), ("the", {"max_gen_toks": 6})))
    assert asked == [ours.tok_encode(text)[-(CONTEXT - 6) :], ours.tok_encode("the")]
    assert "1 requests are longer than max_model_len" in caplog.text
    ours.loglikelihood(requests("loglikelihood", (text, "ä")))
    assert asked[2] == ours.tok_encode(text.rstrip() + " ä")[-(CONTEXT - 1) :], "one token is the engine's"


def test_a_text_that_ends_texts_ends_one_though_it_is_never_shown(ours: EngineLM) -> None:
    params = ours._params({"until": ["<eos>", "", "x"], "max_gen_toks": 5}, seed=3)
    assert params.stop_token_ids == (ours.eot_token_id,)
    assert params.stop == ("<eos>", "x")
    assert (params.temperature, params.max_tokens) == (0.0, 5)


def test_sampling_follows_the_task_and_repeats_differ(ours: EngineLM) -> None:
    wanted = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "max_gen_toks": 8}
    asked = requests("generate_until", *[("the cat", wanted)] * 3)
    first = ours.generate_until(asked)
    assert len(set(first)) > 1
    assert ours.generate_until(asked) == first


WANTED: Mapping[str, tuple[dict[str, Any], str]] = {
    "what it does not know": ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
    "beams": ({"num_beams": 4}, "beam"),
    "more than the context": ({"max_gen_toks": CONTEXT}, "--max-model-len"),
}


@pytest.mark.parametrize("case", WANTED, ids=str)
def test_a_task_that_wants_what_cannot_be_is_refused(case: str, ours: EngineLM) -> None:
    wanted, named = WANTED[case]
    with pytest.raises(ConfigError, match=named):
        ours.generate_until(requests("generate_until", ("the cat", wanted)))


def test_a_score_of_more_than_the_context_is_refused(ours: EngineLM) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        ours.loglikelihood(requests("loglikelihood", ("the cat", "x" * 100)))


def test_a_template_that_is_not_there_is_refused(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_model(tmp_path / "base", template=None)), **SMALL)
    with pytest.raises(ModelError, match="no chat template"):
        EngineLM(llm, chat=True)


BAD = {
    "no tasks": (["{folder}"], "--tasks"),
    "no model": (["--tasks", "tiny_made"], "no model given"),
    "no questions": (["{folder}", "--tasks", "tiny_made", "--limit", "0"], "--limit 0"),
    "no such folder": (["{folder}", "--tasks", "tiny_made", "--include-path", "nowhere"], "--include-path nowhere"),
    "nowhere to write": (["{folder}", "--tasks", "tiny_made", "--output", "no/such/x.json"], "--output no/such"),
    "a name that no file can have": (["{folder}", "--tasks", "tiny_made", "--output", "x" * 300], "--output xxx"),
    "a folder to write": (["{folder}", "--tasks", "tiny_made", "--output", "{folder}"], "--output"),
    "samples for nobody": (["{folder}", "--tasks", "tiny_made", "--log-samples"], "--log-samples"),
    "a key without a server": (["{folder}", "--tasks", "tiny_made", "--api-key", "x"], "--api-key is for"),
    "a setting of a server": (
        ["{folder}", "--tasks", "tiny_made", "--url", "http://127.0.0.1:1", "--dtype", "float32"],
        "dtype is a setting",
    ),
    "an unknown flag": (["{folder}", "--tasks", "tiny_made", "--task", "x"], "--task"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line_and_exit_code_2(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, named = BAD[case]
    assert named in _refusal(run(*(arg.format(folder=folder) for arg in args)), capsys)


def test_a_server_that_is_not_there(folder: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(folder, "--tasks", "tiny_made", "--include-path", tasks, "--url", "http://127.0.0.1:1")
    assert "no server answers there" in _refusal(code, capsys)


def test_an_evaluation_that_fails_leaves_files_as_they_were(folder: Path, tasks: Path, tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("an older result")
    for file in (there, new):
        asked = ("--tasks", "tiny_made", "--include-path", tasks, "--url", "http://127.0.0.1:1")
        assert run(folder, *asked, "--output", file) == 2
    assert there.read_text() == "an older result"
    assert not new.exists()


def test_a_result_that_cannot_be_written_is_shown(
    folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, evaluate = tmp_path / "gone", evaluate_tasks.evaluate
    gone.mkdir()

    def removing(*args: Any, **options: Any) -> Any:
        gone.rmdir()
        return evaluate(*args, **options)

    monkeypatch.setattr(evaluate_tasks, "evaluate", removing)
    args = ("--include-path", tasks, "--limit", 1, *flags(**SMALL), "--output", gone / "result.json")
    assert run(folder, "--tasks", "tiny_made", *args) == 2
    captured = capsys.readouterr()
    assert "|exact_match|" in captured.out
    assert captured.err.splitlines()[-1].startswith(f"isthmus: error: --output {gone}/result.json: no such file")


class Broken(StringIO):
    """Whoever read it went away."""

    def __init__(self, null: IO[bytes]) -> None:
        super().__init__()
        self._null = null

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        return self._null.fileno()


def test_a_result_that_nobody_reads_is_written(
    folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    args = ("--include-path", tasks, "--limit", 1, *flags(**SMALL), "--output", file)
    with open(os.devnull, "wb") as null:
        monkeypatch.setattr(sys, "stdout", Broken(null))
        assert run(folder, "--tasks", "tiny_made", *args) == 1
    assert json.loads(file.read_text())["results"]


@pytest.mark.parametrize("given", [["--api-key", "my-secret"], ["--api-key=my-secret"]])
def test_a_result_says_how_it_was_made_without_the_key(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["isthmus", "bench", "serve", *given, "--json"])
    report.show({}, True, lambda _: ())
    out = capsys.readouterr().out
    command = json.loads(out)["command"]
    assert "my-secret" not in out
    assert command[:2] + command[-1:] == ["bench", "serve", "--json"]
    assert command[2].startswith("--api-key")


def test_data_that_is_not_there(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_tasks(tmp_path, dataset_kwargs={"data_files": {"test": str(tmp_path / "none.jsonl")}})
    line = _refusal(run(folder, "--tasks", "tiny_made", "--include-path", made), capsys)
    assert "--tasks tiny_made: the data cannot be loaded" in line
    assert "none.jsonl" in line


def test_a_task_that_nobody_knows(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(include_path: str | None, include_defaults: bool = True) -> Any:
        """Without the harness' own tasks, which take seconds to list."""
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(evaluate_tasks, "TaskManager", small)
    with pytest.raises(ConfigError, match="no task 'tiny_mad'; tiny_made is one") as caught:
        evaluate_tasks.find(["tiny_choice", "tiny_mad"], tasks)
    assert "\n" not in str(caught.value)
    assert [*evaluate_tasks.find([str(tasks / "tiny_made.yaml")], None)["tasks"]] == ["tiny_made"]


def test_a_harness_that_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "isthmus.evaluate.tasks")
    monkeypatch.delattr("isthmus.evaluate.tasks")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'isthmus[eval]'" in _refusal(run(folder, "--tasks", "tiny_made"), capsys)


def _refusal(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    *bars, line = err.splitlines(keepends=True)  # those of the library that reads the data
    assert all("examples/s" in bar for bar in bars if bar.strip()), err
    return command.refusal(code, out, line)
