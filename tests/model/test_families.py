"""Every family, tiny and random, gives Transformers' own greedy tokens out of a poisoned arena.

One test body over the table of `families.py`; adding a family is a row there. The real scheduler plans, with the
prefix cache on; the audit holds after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.runner import Runner
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request
from isthmus.memory import Pool
from isthmus.model.layout import ModelLayout, derive
from isthmus.params import SamplingParams
from tests.model.families import FAMILIES, config_of
from tests.model.harness import argmax, paged, reference, tiny

LONGEST = 512


@dataclass
class Served:
    """A model, an arena and a scheduler over it."""

    model: PreTrainedModel
    page_size: int = 4
    budget: int = 64  # tokens of a step
    arena_bytes: int = 1 << 22
    static: bool = False
    between: Callable[[Served], object] = lambda _: None
    scheduler: Scheduler = field(init=False)
    runner: Runner = field(init=False)
    cached: list[int] = field(default_factory=list)  # prompt tokens that the last call found, per request

    def __post_init__(self) -> None:
        layout = layout_of(self.model, self.page_size)
        walls: Mapping[str, int] | None = None
        if self.static:
            walls = capacity.best_walls(layout.groups, self.arena_bytes, [(100, 100)])
        self.pool = Pool(self.arena_bytes, layout.groups, walls=walls)
        config = SchedulerConfig(max_num_seqs=min(4, self.budget), max_num_batched_tokens=self.budget)
        self.scheduler = Scheduler(
            self.pool, config, max_model_len=LONGEST, prefix_caching=True, page_size=self.page_size
        )
        self.runner = Runner(self.model, layout, self.arena_bytes, self.pool.capacities, 8, argmax, poison=True)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Greedy continuations of all prompts, queued at once."""
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        requests = [Request(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request)
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.settle(step, self.runner.run(step))
            self.check()
            self.between(self)
        self.cached = [request.receipt.cached_tokens for request in requests]
        return [request.sequences[0].output for request in requests]

    def check(self) -> None:
        self.pool.check()
        assert self.scheduler.cache is not None
        self.scheduler.cache.check()


@cache
def layout_of(model: PreTrainedModel, page_size: int) -> ModelLayout:
    """Found once for all that a test serves: it takes as long as serving a few steps."""
    return derive(model, page_size, "float32")


def compact(served: Served) -> None:
    served.pool.compact()


def preempt_now_and_then(served: Served) -> None:
    running = served.scheduler.running
    if served.scheduler.counters.steps % 10 == 5 and running:
        served.scheduler.preempt(running[len(running) // 2])


@dataclass(frozen=True)
class Case:
    """A family, ready to run, and what Transformers says."""

    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]  # as many tokens as the test wants at most


def make(name: str, new: int) -> Case:
    model_type, values = config_of(name)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (n,), generator=draw).tolist() for n in (61, 1, 23, 40)]
    for seed in range(10):
        model = tiny(model_type, seed=seed, **values)
        expected = [reference(model, prompt, new) for prompt in prompts]
        varied = all(len(set(tokens)) >= 8 for tokens in expected)  # fewer prove little
        if varied and all(margin(model, *pair) > TIE for pair in zip(prompts, expected, strict=True)):
            return Case(paged(model), prompts, expected)
    raise AssertionError(f"{name}: every draw of its weights repeats itself, or is undecided somewhere")


TIE = 3e-5
"""Logits that lie closer are Transformers' own choice in one order of summing and not in another."""


def margin(model: PreTrainedModel, prompt: Sequence[int], continuation: Sequence[int]) -> float:
    """By how much the closest choice of a greedy continuation was made."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *continuation[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.float().topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return make(request.param, 24)


def test_together_in_small_chunks_while_pages_move(case: Case) -> None:
    """Prompts of unlike length cut into chunks of 7 share every step with decodes; every hole is closed at once."""
    served = Served(case.model, 4, budget=7, between=compact)
    assert served.generate(case.prompts, 24) == case.expected
    if len(served.pool.groups) > 1:
        assert sum(served.pool.moved_pages.values()) > 0


def test_preempted_under_static_walls(case: Case) -> None:
    served = Served(case.model, 16, static=True, between=preempt_now_and_then)
    assert served.generate(case.prompts, 24) == case.expected
    assert served.scheduler.counters.preemptions > 0


def test_alone_token_by_token(case: Case) -> None:
    served = Served(case.model, 1, budget=1)
    assert served.generate(case.prompts[:1], 8) == [case.expected[0][:8]]


def test_warm_equals_cold_at_every_page_boundary(case: Case) -> None:
    """What an earlier request left at a boundary gives the tokens that computing it gives."""
    (prompt,), (answer,) = case.prompts[:1], case.expected[:1]
    text, size = prompt + answer, 4
    served = Served(case.model, size)
    for columns in range(1, len(prompt) // size):
        served.generate([text[: columns * size + 1]], 1)  # leaves the boundary
        n = columns * size + 2
        (found,) = served.generate([text[:n]], 1)
        assert served.cached == [columns * size]
        (cold,) = Served(case.model, size).generate([text[:n]], 1)
        assert found == cold
    served.generate([prompt], 8)
    assert served.generate([prompt + answer[:7]], 8) == [answer[7:15]]
    assert served.cached[0] >= len(prompt) // size * size, "the end of a prompt can be come back to"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_three_hundred_tokens(name: str) -> None:
    """The same for long: chunks of 1, 7 and 64 tokens, alone and together."""
    case = make(name, 300)
    assert Served(case.model, 1, budget=1).generate(case.prompts[2:3], 300) == case.expected[2:3]
    for page_size, budget, static, between in (
        (4, 7, False, compact),
        (16, 64, True, preempt_now_and_then),
        (4, 64, False, preempt_now_and_then),
    ):
        served = Served(case.model, page_size, budget=budget, static=static, between=between)
        assert served.generate(case.prompts, 300) == case.expected, f"pages of {page_size}, chunks of {budget}"
