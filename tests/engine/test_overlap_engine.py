"""An engine one step ahead of its results: what it tells when, and that nothing stays out."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from llguidance import LLMatcher

from isthmus.engine.core import Engine
from isthmus.engine.output import RequestOutput
from isthmus.engine.runner import Runner
from isthmus.engine.step import Sampled, Step
from isthmus.errors import ConfigError, IsthmusError
from isthmus.llm import LLM, SamplingParams
from tests.engine.scripted import Overlapping
from tests.engine.test_core import Answers, build, run
from tests.engine.toy_tokenizers import byte_level
from tests.server.tiny_model import write_tiny_model

# -- the engine --------------------------------------------------------------------------------------------------


def overlapping_engine(text: str, answers: type[Answers] = Answers) -> tuple[Engine, list[int], Overlapping]:
    engine, prompt = build(byte_level(), text, overlap=True, answers=answers)
    assert isinstance(engine.executor, Overlapping)
    return engine, prompt, engine.executor


def test_outputs_come_one_step_late_and_the_engine_has_work_until_nothing_is_out() -> None:
    engine, prompt, device = overlapping_engine("abc")
    engine.add_request("a", prompt, SamplingParams(max_tokens=100))
    assert engine.step() == []
    texts = [engine.step()[0].outputs[0].text for _ in range(4)]
    assert texts == ["a", "b", "c", ""]
    assert (engine.scheduler.has_work, len(device.out), engine.has_work) == (False, 1, True)
    assert engine.step() == []
    assert (len(device.out), engine.has_work) == (0, False)
    assert engine.step() == []
    assert device.launches == 5


def test_draining_waits_for_what_is_out_and_refuses_while_requests_are_served() -> None:
    engine, prompt, device = overlapping_engine("abcdef")
    engine.add_request("a", prompt, SamplingParams(max_tokens=100))
    engine.step()
    with pytest.raises(AssertionError, match="abort them first"):
        engine.drain()
    engine.abort("a")
    assert engine.has_work
    engine.drain()
    assert (engine.has_work, len(device.out)) == (False, 0)


def test_a_stop_string_found_late_adds_no_text_of_the_step_that_is_out() -> None:
    engine, prompt, _ = overlapping_engine("abcdef")
    engine.add_request("a", prompt, SamplingParams(max_tokens=100, stop=["cd"]))
    answer = run(engine)[0]["a"].outputs[0]
    assert (answer.text, len(answer.token_ids), answer.stop_reason) == ("ab", 4, "cd")


def test_a_name_that_is_free_again_gets_nothing_of_a_step_that_is_out() -> None:
    class Scored(Answers):
        def run(self, step: Step) -> list[Sampled]:
            results = super().run(step)
            return results + [Sampled(t, -3.0, 2) for span in step.scores for t in span.targets.tolist()]

    engine, prompt, _ = overlapping_engine("abcdef", Scored)
    scored = SamplingParams(max_tokens=3, prompt_logprobs=0)
    engine.add_request("a", [*prompt, *prompt], scored)
    engine.step()
    engine.abort("a")
    engine.add_request("a", prompt, scored)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1]
    assert len(outputs[0].prompt_logprobs or []) == len(prompt)
    engine.add_request("a", prompt, scored)
    engine.step()
    engine.abort("a")
    assert engine.step() == []
    assert not engine.has_work


def test_an_engine_that_failed_waits_for_nothing_any_more() -> None:
    class Fails(Answers):
        def run(self, step: Step) -> list[Sampled]:
            if self.steps:
                raise ZeroDivisionError
            return super().run(step)

    engine, prompt, _ = overlapping_engine("abcdef", Fails)
    engine.add_request("a", prompt, SamplingParams(max_tokens=100))
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(IsthmusError, match="stopped after an error"):
        engine.step()
    engine.abort("a")
    assert not engine.has_work


# -- a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


REQUESTS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, n=3, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1, seed=4, max_tokens=15, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=3),
    SamplingParams(temperature=1, seed=5, max_tokens=30, grammar=LLMatcher.grammar_from_regex("(ab|c){2,4}\\.")),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=6, max_tokens=30, stop=["e", "th"]),
    SamplingParams(temperature=1, seed=7, max_tokens=1),
]
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
PROMPTS = ["the cat sat on the mat", "the cat", "a", "the mat the mat the mat", "the cat sat on", "the the", "a mat"]


def load(folder: Path, rows: int = 8) -> LLM:
    settings = {"dtype": "float32", "pool_bytes": 1 << 20, "page_size": 4, "max_num_batched_tokens": 16}
    return LLM(str(folder), device="cpu", max_num_seqs=rows, **settings)


def overlap(llm: LLM) -> Overlapping:
    """From now on its steps are launched one ahead."""
    assert isinstance(llm.engine.executor, Runner)
    llm.engine.executor = device = Overlapping(llm.engine.executor)
    return device


@pytest.mark.parametrize("rows", [2, 8])
def test_a_model_says_the_same_one_step_at_a_time_and_overlapped(folder: Path, rows: int) -> None:
    one_at_a_time, ahead = load(folder, rows), load(folder, rows)
    device = overlap(ahead)
    want = one_at_a_time.generate(PROMPTS, REQUESTS, use_tqdm=False)
    got = ahead.generate(PROMPTS, REQUESTS, use_tqdm=False)
    assert not ahead.engine.has_work, "a step is still out"
    assert device.fed_back > 50
    for mine, theirs in zip(got, want, strict=True):
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert [entry and [*entry] for entry in mine.prompt_logprobs or ()] == [
            entry and [*entry] for entry in theirs.prompt_logprobs or ()
        ]


def test_the_memory_can_be_changed_after_a_stream_that_was_left(folder: Path) -> None:
    llm = load(folder)
    device = overlap(llm)
    stream = llm.stream("the cat", LONG)
    next(stream)
    assert device.out
    assert isinstance(stream, Generator)
    stream.close()
    assert not device.out
    with llm.static([(8, 8)]):
        assert llm.generate("the cat", LONG, use_tqdm=False)[0].finished


def test_requests_that_lose_their_memory_leave_nothing_running(folder: Path) -> None:
    llm, devices, streams = load(folder), [], []

    def leave_a_stream() -> None:
        with llm.static([(8, 8)]):
            devices.append(overlap(llm))
            streams.append(llm.stream("the cat", LONG))
            next(streams[0])
            assert devices[0].out

    with pytest.raises(ConfigError, match="1 requests were aborted"):
        leave_a_stream()
    assert not devices[0].out
    assert list(streams[0]) == []
