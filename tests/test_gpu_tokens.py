"""A GPU's tokens: Transformers' own in float32, and in bfloat16 the same whatever the memory does.

What runs on the GPU is a helper and a model; the helper itself runs here on a tiny model too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.llm import LLM, Prompt, RequestOutput
from isthmus.params import SamplingParams
from tests.conftest import shared_file
from tests.server.tiny_model import write_tiny_model
from tests.test_demo_tokens import agreeing

QUESTIONS = 200
OUTPUT = 64
COMPACT_EVERY = 8  # steps


def generate(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, compact_every: int | None = None
) -> list[RequestOutput]:
    """Everything at once; every so many steps all holes are closed, so that pages move under running sequences."""
    engine, steps, step = llm.engine, count(1), llm.engine.step

    def stepped() -> list[RequestOutput]:
        if compact_every is not None and next(steps) % compact_every == 0:
            engine.pool.compact()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", stepped)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    engine.pool.check()
    assert llm.usage().live == 0
    return outputs


def assert_sides_agree(llm: LLM, questions: Sequence[str], **sampling: Any) -> None:
    """Unified memory with moving pages gives the tokens of static memory that nobody touches.

    Both sides schedule alike, because memory is ample on both: then rounding is alike too, and equal means equal.
    Every second question is asked twice, the other time for fewer tokens, so that ends leave holes.
    """
    jobs = [(text, n) for i, text in enumerate(questions) for n in ((3 + i % 40, OUTPUT) if i % 2 else (OUTPUT,))]
    prompts: list[Prompt] = [text for text, _ in jobs]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=i, **sampling) for i, (_, n) in enumerate(jobs)]
    moved, steps = sum(llm.engine.pool.moved_pages.values()), llm.engine.scheduler.counters.steps
    ours = generate(llm, prompts, params, compact_every=COMPACT_EVERY)
    assert sum(llm.engine.pool.moved_pages.values()) > moved, "nothing moved: this proves nothing"
    steps = llm.engine.scheduler.counters.steps - steps
    assert llm.engine.scheduler.counters.preemptions == 0
    with llm.static(llm.lengths(prompts, params)):
        theirs = generate(llm, prompts, params)
        assert llm.engine.scheduler.counters.preemptions == 0
        assert llm.engine.scheduler.counters.steps == steps, "the sides do not schedule alike"
    pairs = [(a.outputs[0].token_ids, b.outputs[0].token_ids) for a, b in zip(ours, theirs, strict=True)]
    differ = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert not differ, f"{len(differ)} of {len(pairs)} differ, first in prompt {differ[0]}: {pairs[differ[0]]}"
    assert [len(tokens) for tokens, _ in pairs] == [n for _, n in jobs]


# -- the helper, anywhere ------------------------------------------------------------------------------------


def test_sides_agree_on_a_tiny_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    llm = LLM(
        str(folder), device="cpu", dtype="float32", page_size=4, pool_bytes=4 << 20, max_num_seqs=8,
        max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip
    questions = [f"the cat sat on {i} mats, der Bär läuft {'x' * (i % 7)}" for i in range(12)]
    assert_sides_agree(llm, questions, temperature=0)
    assert_sides_agree(llm, questions, temperature=0.8, top_p=0.95)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    """What Transformers said."""
    items: list[dict[str, Any]] = json.loads(shared_file("gemma3_270m_greedy.json").read_text())["items"]
    assert len(items) == 20
    return items


@pytest.fixture(scope="module")
def questions() -> list[str]:
    lines = shared_file("gsm8k_test.jsonl").read_text().splitlines()
    return [json.loads(line)["question"] for line in lines[:QUESTIONS]]


def on_gpu(dtype: str, **settings: Any) -> LLM:
    return LLM("demo", dtype=dtype, device="cuda", pool_bytes=4 << 30, max_model_len=4096, max_num_seqs=128, **settings)


def assert_recorded(llm: LLM, recorded: Sequence[dict[str, Any]], *, compact_every: int | None = None) -> None:
    """Each prompt with its 64 tokens, and between them shorter decoys whose ends leave holes."""
    jobs = [(item, length) for i, item in enumerate(recorded) for length in ((3 + i, 64) if i % 2 else (64,))]
    prompts: list[Prompt] = [{"prompt_token_ids": item["prompt_token_ids"]} for item, _ in jobs]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in jobs]
    outputs = generate(llm, prompts, params, compact_every=compact_every)
    compared = sum(agreeing(item, output.outputs[0].token_ids) for (item, _), output in zip(jobs, outputs, strict=True))
    assert compared > 20 * 40, "most tokens are told apart by more than a tie"


@pytest.mark.gpu
def test_float32_products_are_float32() -> None:
    """Nothing here changes torch's defaults; if they change, the tests below compare other numbers."""
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.gpu
def test_tokens_equal_transformers(recorded: list[dict[str, Any]]) -> None:
    """Cold, out of the prefix cache, and with walls."""
    llm = on_gpu("float32")
    assert llm.graph_bytes > 0
    assert_recorded(llm, recorded)
    longest = max((item["prompt_token_ids"] for item in recorded), key=len)
    (warm,) = llm.generate({"prompt_token_ids": longest}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert warm.num_cached_tokens >= 1024
    assert_recorded(llm, recorded)
    with llm.static([(512, 64)]):
        assert_recorded(llm, recorded)


@pytest.mark.gpu
def test_tokens_equal_transformers_with_pages_of_64_that_move(recorded: list[dict[str, Any]]) -> None:
    llm = on_gpu("float32", page_size=64, enable_prefix_caching=False)
    assert_recorded(llm, recorded, compact_every=3)
    assert sum(llm.engine.pool.moved_pages.values()) > 0


@pytest.mark.gpu
def test_tokens_equal_transformers_launch_by_launch(recorded: list[dict[str, Any]]) -> None:
    llm = on_gpu("float32", enforce_eager=True)
    assert llm.graph_bytes == 0
    assert_recorded(llm, recorded)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_unified_equals_static_on_gsm8k(page_size: int, questions: list[str]) -> None:
    """bfloat16, greedy and drawn."""
    llm = on_gpu("bfloat16", page_size=page_size, enable_prefix_caching=False)
    assert_sides_agree(llm, questions, temperature=0)
    assert_sides_agree(llm, questions, temperature=0.8, top_p=0.95)
