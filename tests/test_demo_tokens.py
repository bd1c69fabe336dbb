"""The demo model's greedy tokens, whatever the memory does: they are those that Transformers gave in fp32.

The default run covers every value of every axis, and each prompt in two of its cases;
`pytest -m slow tests/test_demo_tokens.py` runs the whole matrix with all prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from isthmus.llm import LLM, RequestOutput
from isthmus.params import SamplingParams
from tests.conftest import shared_file

MARGIN = 0.01  # a smaller gap between the two best logits is a tie that rounding may turn


@dataclass(frozen=True)
class Case:
    memory: str
    page_size: int
    chunk: int
    disturbance: str  # what is done to the memory between steps

    def __str__(self) -> str:
        return f"{self.memory}-page{self.page_size}-chunk{self.chunk}-{self.disturbance}"


MATRIX = [
    Case(*axes) for axes in product(("unified", "static"), (1, 16, 64), (64, 512), ("none", "compaction", "preemption"))
]
DAILY = [
    Case("unified", 16, 512, "compaction"),
    Case("unified", 1, 64, "preemption"),
    Case("static", 64, 512, "preemption"),
    Case("static", 1, 512, "compaction"),
]


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(shared_file("gemma3_270m_greedy.json").read_text())["items"]
    assert len(items) == 20
    return items


def check(case: Case, recorded: list[dict[str, Any]], arena: int) -> None:
    """Each prompt with its 64 tokens, and between them shorter decoys whose ends leave holes."""
    llm = LLM(
        "demo",
        dtype="float32",
        memory=case.memory,
        page_size=case.page_size,
        max_num_batched_tokens=case.chunk,
        max_num_seqs=min(64, case.chunk),
        max_model_len=4096,
        pool_bytes=arena,
        enable_prefix_caching=case.disturbance != "compaction",  # what ended must leave holes, not cached pages
    )
    jobs = [(item, length) for i, item in enumerate(recorded) for length in ((3 + i, 64) if i % 2 else (64,))]
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item, _ in jobs]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in jobs]
    scheduler, pool = llm.engine.scheduler, llm.engine.pool
    last_step = 0

    def disturb(index: int, output: RequestOutput) -> None:
        nonlocal last_step
        if scheduler.counters.steps == last_step:
            return
        last_step = scheduler.counters.steps
        if case.disturbance == "compaction":
            pool.compact()
        elif case.disturbance == "preemption" and last_step % 25 == 0 and len(scheduler.running) > 1:
            scheduler.preempt(scheduler.running[-1])
        pool.check()

    outputs = llm.generate(prompts, params, use_tqdm=False, on_output=disturb)
    assert case.disturbance != "compaction" or sum(pool.moved_pages.values()) > 0
    assert (scheduler.counters.preemptions > 0) == (case.disturbance == "preemption")
    assert llm.usage().live == 0
    compared = sum(agreeing(item, output.outputs[0].token_ids) for (item, _), output in zip(jobs, outputs, strict=True))
    assert compared > len(recorded) * 40, "most tokens are told apart by more than a tie"


def agreeing(item: dict[str, Any], tokens: list[int]) -> int:
    """How many tokens there are up to the first tie that turned out otherwise; asserts that they are the recorded."""
    want, margins = item["output_token_ids"][: len(tokens)], item["top1_minus_top2"]
    for i, (token, expected) in enumerate(zip(tokens, want, strict=True)):
        if token != expected:
            assert margins[i] <= MARGIN, f"{item['name']}: token {i} is {token}, not {expected} (gap {margins[i]})"
            return i
    return len(tokens)


@pytest.mark.parametrize("case", DAILY, ids=str)
def test_tokens_equal_transformers(case: Case, recorded: list[dict[str, Any]]) -> None:
    """With every other pair of prompts, two of which are longer than two windows."""
    turn = DAILY.index(case)
    half = [item for i, item in enumerate(recorded) if (i + turn) % 4 < 2]
    assert sum(len(item["prompt_token_ids"]) > 1024 for item in half) == 2
    check(case, half, 256 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in DAILY], ids=str)
def test_tokens_equal_transformers_in_the_whole_matrix(case: Case, recorded: list[dict[str, Any]]) -> None:
    check(case, recorded, 1 << 30)
