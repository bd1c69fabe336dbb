"""What a step says of its samples is what their requests want, whenever somebody looks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.engine import samples
from isthmus.engine.sampler import is_edited, is_greedy
from isthmus.engine.samples import indices_of
from isthmus.engine.step import Sampled, SampleRow
from tests.engine.test_scheduler import World

GREEDY = {"temperature": 0.0}
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {3: 1.0}},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": -0.5},
]


def is_plain(sample: SampleRow) -> bool:
    """Nothing is wanted but the first maximum of the logits as they are."""
    return sample.params.logprobs is None and is_greedy(sample.params) and not is_edited(sample)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_greedy_samples_alone_is_plain(overlap: bool) -> None:
    world = World("full", 4, room_for=4, length=60, overlap=overlap)
    for _ in range(3):
        world.add(5, 20, **GREEDY)
    while world.has_work:
        world.advance()
    assert all(step.plain for step in world.executor.steps)
    world.assert_answers()


@pytest.mark.parametrize("params", OTHERS, ids=str)
def test_a_sample_that_wants_more_makes_its_steps_not_plain(params: dict[str, Any]) -> None:
    world = World("full", 4, room_for=4, length=60)
    world.add(5, 9, **GREEDY)
    world.add(5, 4, **params)
    while world.has_work:
        world.advance()
    for step in world.executor.steps:
        assert step.plain == all(is_plain(sample) for sample in step.samples)
    assert {step.plain for step in world.executor.steps} == {False, True}


def test_samples_become_plain_when_the_end_is_not_held_back_any_more() -> None:
    world = World("full", 4, room_for=4, length=60)
    world.add(5, 9, min_tokens=3, **GREEDY)
    world.finish()
    assert [step.plain for step in world.executor.steps] == [False] * 3 + [True] * 6


def test_samples_tell_of_the_time_of_the_plan() -> None:
    """Also after other steps were planned and settled, and when the row is another one's."""
    world = World("full", 4, room_for=4, length=60)
    world.add(5, 3)
    step = world.scheduler.schedule()
    assert step is not None
    world.scheduler.settle(step, [7])
    later = world.scheduler.schedule()
    assert later is not None
    world.scheduler.settle(later, [Sampled(8)])
    world.scheduler.abort("0")
    (sample,), (next_sample,) = step.samples, later.samples
    assert (sample.row, sample.index, sample.position) == (0, 4, 5)
    assert (next_sample.row, next_sample.index, next_sample.position) == (0, 0, 6)
    assert step.samples[0] is sample
    assert world.requests[0].sequences[0].output == [7, 8]


def test_indices_are_those_of_the_samples_and_spell_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("full", 4, room_for=4, length=60)
    for prompt in (5, 7, 30):  # the last one has a chunk, and no sample, in the first step
        world.add(prompt, 3)
    steps = [world.step(), world.step()]
    for step in steps:
        assert indices_of(step.samples).tolist() == [sample.index for sample in step.samples]
        assert np.array_equal(indices_of(list(step.samples)), indices_of(step.samples))
        assert indices_of(list(step.samples)).dtype == indices_of(step.samples).dtype == np.int32
    monkeypatch.setattr(samples, "_sample_row", None)
    fresh = world.scheduler.schedule()
    assert fresh is not None
    assert len(indices_of(fresh.samples)) == len(fresh.samples) == 3
