"""The engine with a scripted executor: text, stop strings, logprobs, aborts and failures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
from tokenizers import Tokenizer

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.output import RequestOutput
from isthmus.engine.step import Launched, Logprob, Sampled, Step
from isthmus.errors import IsthmusError
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.params import RequestError, SamplingParams
from tests.engine.scripted import Overlapping, ScriptedExecutor
from tests.engine.toy_tokenizers import byte_level, llama, token_id

Executor = Callable[[Pool], Any]


class Answers(ScriptedExecutor):
    """Says a fixed text after each prompt, whatever the prompt, with logprobs."""

    def __init__(self, pool: Pool, prompt_length: int, tokens: Sequence[int]) -> None:
        super().__init__(pool, 8, lambda seen: tokens[min(len(seen) - prompt_length, len(tokens) - 1)])

    def run(self, step: Step) -> list[Sampled]:
        top = (Logprob(1, -0.25, 1), Logprob(2, -1.5, 2))
        return [
            Sampled(s.token_id, -2.0, 3, top[: row.params.logprobs or 0], s.problem)
            for s, row in zip(super().run(step), step.samples, strict=True)
        ]


class EngineFor(Protocol):
    """`build`, with steps one at a time or overlapped."""

    def __call__(
        self,
        tokenizer: Tokenizer,
        text: str,
        prompt: str = "the cat",
        *,
        prefix_caching: bool = False,
        answers: type[Answers] = Answers,
    ) -> tuple[Engine, list[int]]: ...


@pytest.fixture(params=[False, True], ids=["one at a time", "overlapped"])
def engine_for(request: pytest.FixtureRequest) -> EngineFor:
    return functools.partial(build, overlap=request.param)


def build(
    tokenizer: Tokenizer,
    text: str,
    prompt: str = "the cat",
    *,
    prefix_caching: bool = False,
    overlap: bool = False,
    answers: type[Answers] = Answers,
) -> tuple[Engine, list[int]]:
    """An engine whose model answers `text` and then the end token; the prompt's ids."""
    pool = Pool(
        1 << 16,
        [Group("full", opaque_spec(64, 4), "append"), Group("window", opaque_spec(160, 4), "window", 9)],
    )
    prompt_ids = tokenizer.encode(prompt).ids
    whole = tokenizer.encode(prompt + text).ids
    assert whole[: len(prompt_ids)] == prompt_ids
    eos = token_id(tokenizer, "<eos>")
    executor = answers(pool, len(prompt_ids), [*whole[len(prompt_ids) :], eos])
    engine = Engine(
        pool,
        Overlapping(executor) if overlap else executor,
        tokenizer,
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        max_model_len=200,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=[eos],
        prefix_caching=prefix_caching,
    )
    return engine, prompt_ids


def run(engine: Engine) -> tuple[dict[str, RequestOutput], dict[str, list[RequestOutput]]]:
    """All outputs merged by request, and the increments they were merged from."""
    merged: dict[str, RequestOutput] = {}
    pieces: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            pieces.setdefault(output.request_id, []).append(output)
    for name, parts in pieces.items():
        first = parts[0]
        merged[name] = RequestOutput(first.request_id, first.prompt, first.prompt_token_ids, [])
        for part in parts:
            known = {o.index for o in merged[name].outputs}
            merged[name].outputs += [type(o)(o.index) for o in part.outputs if o.index not in known]
            merged[name].merge(part)
    assert sum(g.live_pages for g in engine.pool.usage().groups.values()) == 0
    engine.pool.check()
    return merged, pieces


@pytest.mark.parametrize("make", [byte_level, llama])
def test_increments_add_up_to_the_answer_and_the_end_token_is_no_text(
    make: Callable[[], Tokenizer], engine_for: EngineFor
) -> None:
    tokenizer = make()
    text = " the cat ä한🙂. the"
    engine, prompt = engine_for(tokenizer, text)
    engine.add_request("a", prompt, SamplingParams(max_tokens=100), prompt="the cat")
    merged, pieces = run(engine)
    (answer,) = merged["a"].outputs
    assert answer.text == text
    assert answer.token_ids[-1] == token_id(tokenizer, "<eos>")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert (merged["a"].prompt, merged["a"].prompt_token_ids, merged["a"].finished) == ("the cat", prompt, True)
    assert [piece.finished for piece in pieces["a"]] == [False] * (len(pieces["a"]) - 1) + [True]
    assert len(pieces["a"]) == len(answer.token_ids)


@pytest.mark.parametrize(("include", "want"), [(False, " a ca"), (True, " a cat")])
def test_a_stop_string_inside_a_token_cuts_the_text_and_frees_the_pages(
    include: bool, want: str, engine_for: EngineFor
) -> None:
    engine, prompt = engine_for(byte_level(), " a cat the mat")
    stop = SamplingParams(max_tokens=100, stop=["mat", "t"], include_stop_str_in_output=include)
    engine.add_request("a", prompt, stop)
    engine.add_request("b", prompt, SamplingParams(max_tokens=100))
    merged, _ = run(engine)
    answer = merged["a"].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (want, "stop", "t")
    assert merged["b"].outputs[0].text == " a cat the mat"


def test_a_stop_string_completed_by_the_last_token_allowed_is_still_the_reason(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abcdef")
    engine.add_request("a", prompt, SamplingParams(max_tokens=3, stop=["bc"]))
    engine.add_request("b", prompt, SamplingParams(max_tokens=3, stop=["cd"]))
    merged, _ = run(engine)
    assert [(o.text, o.finish_reason, o.stop_reason) for o in merged["a"].outputs] == [("a", "stop", "bc")]
    assert [(o.text, o.finish_reason, o.stop_reason) for o in merged["b"].outputs] == [("abc", "length", None)]


def test_a_stop_token_is_in_the_ids_and_in_the_text_only_when_asked_for(engine_for: EngineFor) -> None:
    tokenizer = byte_level()
    stop = tokenizer.encode("d").ids
    for include, want in ((False, "abc"), (True, "abcd")):
        engine, prompt = engine_for(tokenizer, "abcdef")
        params = SamplingParams(max_tokens=9, stop_token_ids=stop, include_stop_str_in_output=include)
        engine.add_request("a", prompt, params)
        answer = run(engine)[0]["a"].outputs[0]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (want, "stop", stop[0])
        assert answer.token_ids[-1] == stop[0]


def test_n_continuations_end_on_their_own_and_the_request_with_the_last(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abc")
    engine.add_request("a", prompt, SamplingParams(n=3, max_tokens=10))
    merged, pieces = run(engine)
    assert [(o.index, o.text) for o in merged["a"].outputs] == [(0, "abc"), (1, "abc"), (2, "abc")]
    assert sum(piece.finished for piece in pieces["a"]) == 1


def test_logprobs_name_the_chosen_token_first_and_add_up(engine_for: EngineFor) -> None:
    tokenizer = byte_level()
    engine, prompt = engine_for(tokenizer, "abc")
    engine.add_request("a", prompt, SamplingParams(max_tokens=2, logprobs=2))
    answer = run(engine)[0]["a"].outputs[0]
    assert answer.cumulative_logprob == -4.0
    assert answer.logprobs is not None
    chosen = tokenizer.encode("a").ids[0]
    assert list(answer.logprobs[0]) == [chosen, 1, 2]
    assert answer.logprobs[0][chosen].decoded_token == "a"
    assert [entry.rank for entry in answer.logprobs[0].values()] == [3, 1, 2]


def test_ids_outside_the_vocabulary_are_refused_by_name_and_nothing_is_queued(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abc")
    size = byte_level().get_vocab_size()
    for ids, params, name in (
        ([*prompt, size], SamplingParams(), "the prompt"),
        ([-1], SamplingParams(), "the prompt"),
        (prompt, SamplingParams(logit_bias={size: 1.0}), "logit_bias"),
        (prompt, SamplingParams(stop_token_ids=[-3]), "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match=f"{name} has token id"):
            engine.add_request("a", ids, params)
    assert not engine.has_work


@pytest.mark.parametrize("strange", [1.0, True, "1", None])
def test_what_is_no_token_id_is_refused_and_nothing_is_queued(strange: Any, engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abc")
    with pytest.raises(RequestError, match=r"^the prompt has .* where a token id is due"):
        engine.add_request("a", [*prompt, strange], SamplingParams())
    assert not engine.has_work
    engine.add_request("a", prompt, SamplingParams(max_tokens=2))
    assert run(engine)[0]["a"].outputs[0].text == "ab"


def test_a_request_whose_text_cannot_be_spelled_is_not_queued(
    monkeypatch: pytest.MonkeyPatch, engine_for: EngineFor
) -> None:
    engine, prompt = engine_for(byte_level(), "abc")
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "decode", lambda *args, **more: 1 / 0)
        patch.setattr("isthmus.engine.core.Detokenizer", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.add_request("a", prompt, SamplingParams())
    assert not engine.has_work
    engine.add_request("a", prompt, SamplingParams(max_tokens=2))
    assert run(engine)[0]["a"].outputs[0].text == "ab"


class NoNumbers(Answers):
    """Finds no token for the second sequence of a step, from the third step on."""

    def run(self, step: Step) -> list[Sampled]:
        results = super().run(step)
        if len(self.steps) > 2 and len(results) > 1:
            results[1] = Sampled(-1, problem="not a number")
        return results


def test_a_sequence_without_a_token_ends_with_the_reason_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture, engine_for: EngineFor
) -> None:
    engine, prompt = engine_for(byte_level(), "abcdef", answers=NoNumbers)
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt, SamplingParams(max_tokens=10, stop=["bz"], logprobs=0))
    merged, _ = run(engine)
    broken = merged["b"].outputs[0]
    assert (broken.text, broken.finish_reason, broken.stop_reason) == ("ab", "abort", "not a number")
    assert len(broken.token_ids) == len(broken.logprobs or []) == 2
    assert merged["b"].finished
    assert merged["a"].outputs[0].text == "abcdef"
    assert [record.getMessage() for record in caplog.records][:1] == [
        "request b ends without its next token: not a number"
    ]


@pytest.mark.parametrize("problem", ["not a number", None])
def test_pages_computed_before_a_problem_are_not_given_to_later_requests(
    problem: str | None, monkeypatch: pytest.MonkeyPatch, engine_for: EngineFor
) -> None:
    engine, prompt = engine_for(byte_level(), "abc", "the cat sat on the mat and the mat", prefix_caching=True)
    with monkeypatch.context() as patch:
        if problem is not None:
            scripted = engine.executor.inner if isinstance(engine.executor, Overlapping) else engine.executor
            patch.setattr(scripted, "_sample", lambda *args: Sampled(-1, -1.0, 1, problem=problem))
        engine.add_request("a", prompt, SamplingParams())
        while engine.has_work:
            engine.step()
    assert engine.scheduler.cache is not None
    assert (len(engine.scheduler.cache) == 0) == (problem is not None)


def test_an_aborted_request_says_nothing_more_and_its_name_is_free_again(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abcdefgh")
    engine.add_request("a", prompt, SamplingParams(max_tokens=10))
    engine.add_request("b", prompt, SamplingParams(max_tokens=10))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    merged, _ = run(engine)
    assert list(merged) == ["b"]
    engine.add_request("a", prompt, SamplingParams(max_tokens=2))
    assert run(engine)[0]["a"].outputs[0].text == "ab"


def test_an_engine_whose_executor_failed_refuses_to_go_on(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abc")
    engine.add_request("a", prompt, SamplingParams())
    engine.executor = Broken()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(IsthmusError, match="stopped after an error"):
        engine.step()
    with pytest.raises(IsthmusError, match="stopped after an error"):
        engine.add_request("b", prompt, SamplingParams())


@pytest.mark.parametrize("what", ["_settle", "_score"])
def test_an_error_after_the_executor_ends_the_engine_as_well(
    what: str, monkeypatch: pytest.MonkeyPatch, engine_for: EngineFor
) -> None:
    engine, prompt = engine_for(byte_level(), "abc")
    engine.add_request("a", prompt, SamplingParams())
    monkeypatch.setattr(engine, what, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(engine)
    with pytest.raises(IsthmusError, match="stopped after an error"):
        engine.step()


class Broken:
    """An executor whose device is gone."""

    overlaps = False

    def launch(self, step: Step) -> Launched:
        raise ZeroDivisionError
