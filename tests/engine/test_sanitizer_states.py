"""Faults of state pages, and what the audit alone finds, beside full attention and a window."""

from __future__ import annotations

import dataclasses
import logging
import random
from typing import Any

import numpy as np
import pytest

from isthmus.engine.core import Engine
from isthmus.engine.output import CompletionOutput
from isthmus.engine.step import Step
from isthmus.memory import Copies
from tests.engine.sanitized import (
    Tampered,
    engine_for,
    family,
    ids_of,
    in_use,
    scripted_engine,
    sequence_of,
    serve,
    with_ops,
)
from tests.engine.sanitized_case import told
from tests.engine.scripted import expected
from tests.engine.test_device_runner import random_prompts
from tests.model.harness import paged, reference

NEW = 12
DRAW = random.Random(3)
PROMPTS = {name: [DRAW.randrange(97) for _ in range(n)] for name, n in zip("abc", (30, 11, 21), strict=True)}


@pytest.fixture(params=[False, True], ids=["one at a time", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, "isthmus")
    return caplog


def reports(log: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in log.records]
    return [message for message in messages if message.startswith("memory fault")]


def judge(engine: Engine, outputs: dict[str, CompletionOutput], victims: str) -> None:
    """The victims end, the others are right, and so is everybody in the next round; nothing is left in use."""
    for name, output in outputs.items():
        wanted = expected(PROMPTS[name], NEW)
        if name in victims:
            assert output.finish_reason == "abort"
            assert output.token_ids == wanted[: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.token_ids) == ("length", wanted)
    again = serve(engine, PROMPTS, NEW)
    assert all(output.token_ids == expected(PROMPTS[name], NEW) for name, output in again.items())
    engine.reset_prefix_cache()
    assert in_use(engine) == 0


def state_of(engine: Engine, name: str) -> int:
    """The id of a running request's state."""
    return int(engine.scheduler.placement.states(np.array([sequence_of(engine, name).row]))[0])


def test_a_state_that_two_sequences_go_on_from(log: pytest.LogCaptureFixture, overlap: bool) -> None:
    engine, _ = scripted_engine(overlap=overlap)
    seen: list[int] = []

    def share(step: Step) -> Step:
        if engine.scheduler.counters.steps != 6:
            return step
        states = step.states.copy()
        rows = step.rows.tolist()
        seen.append(state_of(engine, "a"))
        states[rows.index(sequence_of(engine, "c").row)] = seen[0]
        return dataclasses.replace(step, states=states)

    Tampered(engine, share)
    judge(engine, serve(engine, PROMPTS, NEW), "c")
    (report,) = reports(log)
    assert report.startswith("memory fault (foreign): a sequence uses what is another's")
    told(report, request="'c'", group="state", page=f"(virtual id {seen[0]})", found="on a page that 'a' had first")
    told(report, done="is left to 'a', whose it is now")


def test_a_state_of_a_model_that_two_sequences_go_on_from(log: pytest.LogCaptureFixture, overlap: bool) -> None:
    """Short convolutions: the one at fault is kept from writing, so the other one's tokens are Transformers'."""
    model = family("lfm2")
    prompts = dict(zip("xyz", random_prompts(12, 7, 17), strict=True))
    wanted = {name: reference(model, prompt, 8) for name, prompt in prompts.items()}
    engine, _ = engine_for(paged(model), overlap=overlap, arena_bytes=1 << 20)

    def share(step: Step) -> Step:
        if engine.scheduler.counters.steps != 5:
            return step
        states, rows = step.states.copy(), step.rows.tolist()
        states[rows.index(sequence_of(engine, "z").row)] = state_of(engine, "x")
        return dataclasses.replace(step, states=states)

    Tampered(engine, share)
    outputs = serve(engine, prompts, 8)
    assert outputs["z"].finish_reason == "abort"
    assert all(outputs[name].token_ids == wanted[name] for name in "xy")
    told(reports(log)[0], request="'z'", group="state, layer", found="on a page that 'x' had first")
    again = serve(engine, prompts, 8)
    assert {name: output.token_ids for name, output in again.items()} == wanted


@pytest.mark.parametrize("where", ["another boundary", "another text"])
def test_a_snapshot_of_the_wrong_place(log: pytest.LogCaptureFixture, overlap: bool, where: str) -> None:
    """A hit gets the state of a shorter prefix, or of another prompt as long as its own."""
    engine, _ = scripted_engine(overlap=overlap, prefix_caching=True, arena_bytes=1 << 16)
    head = PROMPTS["a"][:28]
    other = head[:12] if where == "another boundary" else [(token + 1) % 97 for token in head]
    serve(engine, {"head": [*head, 1], "other": [*other, 1]}, 1)
    cache = engine.scheduler.cache
    assert cache is not None
    table = engine.pool.table("state").entries
    kept = [int(table[v]) for v in cache.ids("states")]
    assert engine.sanitizer is not None
    assert engine.sanitizer._shadow is not None
    taken = engine.sanitizer._shadow.pages["state"].filled.copy()
    seen: list[int] = []

    def restore(step: Step) -> Step:
        ops = list(step.delta.ops)
        at = [i for i, op in enumerate(ops) if isinstance(op, Copies) and int(op.source[0]) in kept]
        if seen or not at:
            return step
        copy = ops[at[0]]
        assert isinstance(copy, Copies)
        wrong = next(page for page in kept if page != copy.source[0] and taken[page] == len(other))
        seen.append(int(copy.destination[0]))
        ops[at[0]] = Copies("state", np.array([wrong], np.int32), copy.destination)
        return with_ops(step, ops)

    Tampered(engine, restore)
    judge(engine, serve(engine, PROMPTS, NEW), "a")
    report = reports(log)[0]
    assert report.startswith("memory fault (state): a state is not that of the place where its sequence goes on")
    text = "12 tokens" if where == "another boundary" else "28 tokens of another text"
    told(report, request="'a'", group="state", page=f"page {seen[0]} ", found=f"from a state that has taken in {text}")
    told(report, done=f"page {seen[0]} is fenced; ended: 'a'; everybody else is served on")
    assert "filled with a copy of page" in report


@pytest.mark.parametrize("check", ["audit", "full"])
def test_an_abort_that_forgets_a_kind(log: pytest.LogCaptureFixture, overlap: bool, check: str) -> None:
    engine, _ = scripted_engine(overlap=overlap, check=check)
    pool: Any = engine.pool
    release, seen = pool.release, list[int]()

    def abort() -> None:
        seen.append(state_of(engine, "b"))
        pool.release = lambda space, ids: release(space, ids) if space != "states" else None
        engine.abort("b")
        pool.release = release

    outputs = serve(engine, PROMPTS, NEW, lambda step: abort() if step == 6 else None, vanishing="b")
    assert all(outputs[name].token_ids == expected(PROMPTS[name], NEW) for name in "ac")
    (report,) = reports(log)
    assert report.startswith("memory fault (leak): an id is live and nobody has it")
    told(report, request="'b', which had it last", group="state", page=f"(virtual id {seen[0]})", done="is fenced")
    assert pool.fenced["states"][seen[0]]
    judge(engine, serve(engine, PROMPTS, NEW), "")
    assert len(reports(log)) == 1


# -- the audit alone -------------------------------------------------------------------------------------------


def test_the_audit_finds_an_id_that_is_used_and_free(log: pytest.LogCaptureFixture, overlap: bool) -> None:
    engine, scripted = scripted_engine(overlap=overlap, check="audit")
    seen: list[int] = []

    def free() -> None:
        seen.append(ids_of(engine, "a")[0])
        engine.pool.release("tokens", [seen[0]])

    with pytest.MonkeyPatch.context() as patch:  # what the step reads meanwhile is not checked: nobody promised that
        patch.setattr(scripted, "_read", lambda *args: None)
        outputs = serve(engine, PROMPTS, NEW, lambda step: free() if step == 6 else None)
    assert outputs["a"].finish_reason == "abort"
    told(reports(log)[0], request="'a'", found=f"id {seen[0]} is in use and not live")
    assert all(outputs[name].finish_reason == "length" for name in "bc")


def test_the_audit_finds_books_that_contradict_each_other(log: pytest.LogCaptureFixture, overlap: bool) -> None:
    """Two ids change places in one of the two directions: v2p and p2v disagree where the step wrote."""
    engine, _ = scripted_engine(overlap=overlap, check="audit")
    seen: list[str] = []

    def confuse(step: Step) -> Step:
        if engine.scheduler.counters.steps != 7:
            return step
        row = next(row for row, v in zip(step.block_writes.row, step.block_writes.virtual, strict=True) if v)
        name = next(s.request.request_id for s in engine.scheduler.running if s.row == row)
        virtual, region = ids_of(engine, name)[-1], engine.pool.regions["full"]
        page = int(engine.pool.table("full").entries[virtual])
        region.owner[page] = virtual + 1
        engine.executor = engine.sanitizer  # type: ignore[assignment]
        seen.extend((name, str(page), str(virtual)))
        return step

    Tampered(engine, confuse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.pool), "check", lambda pool: None)  # nobody can mend that
        outputs = serve(engine, PROMPTS, NEW)
    victim, page, virtual = seen
    assert outputs[victim].finish_reason == "abort"
    report = reports(log)[0]
    assert report.startswith("memory fault (books): the books of the pool contradict each other")
    told(report, request=repr(victim), found=f"page {page} is that of id {int(virtual) + 1}")
    assert [o.finish_reason for name, o in outputs.items() if name != victim] == ["length"] * 2


def test_without_the_flag_nothing_is_checked() -> None:
    engine, _ = scripted_engine(check="off")
    assert engine.sanitizer is None
    assert all(o.finish_reason == "length" for o in serve(engine, PROMPTS, NEW).values())
