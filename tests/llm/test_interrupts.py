"""Calls of the offline API that end early: by Ctrl-C at any moment, by an error, by an abort. The engine serves on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from isthmus.errors import ConfigError
from isthmus.llm import LLM, RequestOutput
from tests.llm.small import GREEDY


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_the_call_after_the_step_and_the_engine_serves_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    launch, steps = llm.engine.executor.launch, 0

    def interrupted(step: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(pid, signal.SIGINT)
        return launch(step)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False)
    assert steps == 3
    assert not llm.engine.has_work
    assert llm.usage().live == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (output,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("when", ["in the middle of it", "before anything is held back"])
def test_a_second_ctrl_c_while_requests_are_aborted_damages_nothing(
    when: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    release, end, presses = llm.engine.pool.release, llm._end, 0

    def press() -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            signal.raise_signal(signal.SIGINT)

    def released(space: str, ids: Any) -> Any:
        press()
        return release(space, ids)

    def ended(names: Any) -> None:
        press()
        end(names)

    def stop(index: int, output: RequestOutput) -> None:
        if when == "in the middle of it":
            monkeypatch.setattr(llm.engine.pool, "release", released)
        else:
            monkeypatch.setattr(llm, "_end", ended)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the mat " * 4, "a dog " * 4], GREEDY, use_tqdm=False, on_output=stop)
    monkeypatch.undo()
    assert presses > 1
    assert not llm.engine.scheduler.requests
    assert not llm._inboxes
    llm.engine.pool.check()
    (after,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_requests_are_queued_leaves_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add = llm.engine.scheduler.waiting.add

    def pressed(sequence: Any) -> None:
        add(sequence)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.scheduler.waiting, "add", pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    assert not len(llm.engine.scheduler.waiting)
    assert not llm._inboxes


def test_an_error_in_on_output_aborts_the_call(llm: LLM) -> None:
    def fail(index: int, output: RequestOutput) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False, on_output=fail)


def test_on_output_may_abort_a_request_and_the_others_finish(llm: LLM) -> None:
    def stop_first(index: int, output: RequestOutput) -> None:
        if index == 0 and len(output.outputs[0].token_ids) == 5:
            llm.engine.abort(output.request_id)

    first, second = llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False, on_output=stop_first)
    assert (first.finished, len(first.outputs[0].token_ids)) == (False, 5)
    assert (second.finished, len(second.outputs[0].token_ids)) == (True, 20)


def test_an_error_beside_a_running_stream_is_the_one_that_is_raised(llm: LLM) -> None:
    def leave_a_stream(error: type[Exception] | None) -> None:
        with llm.static([(8, 8)]):
            stream = llm.stream("the cat", GREEDY)
            streams.append(stream)
            next(stream)
            if error is not None:
                raise error

    streams: list[Iterator[RequestOutput]] = []
    with pytest.raises(LookupError):
        leave_a_stream(LookupError)
    assert llm.engine.pool.walls is None
    assert list(streams[0]) == []
    with pytest.raises(ConfigError, match="1 requests were aborted"):
        leave_a_stream(None)
    assert llm.engine.pool.walls is None
    assert len(llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 20
