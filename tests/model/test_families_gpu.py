"""Every family on the GPU's executor: in float32 Transformers' own greedy tokens, and in bfloat16 the same tokens
whatever the memory does.

On a GPU all rows of `families.py` run, launch by launch, which is cheap; a few of them in CUDA graphs with compiled
layers. Here a few rows run through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_device_runner import random_prompts
from tests.model.device_serving import decided, everywhere, greedy, on_device, require
from tests.model.families import FAMILIES
from tests.model.harness import tiny


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "lfm2_moe"])
def test_bfloat16_unified_equals_static_in_graphs(family: str) -> None:
    """Layers compiled, experts too. These take longest: where tests are shared out, they begin first."""
    assert_sides_agree("cuda", family, graphs=True)


BFLOAT16 = {
    "qwen3_5": "gated delta net",
    "kimi_linear": "KDA, MLA, experts",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2 beside attention",
    "jamba": "Mamba-1, experts",
    "minimax": "lightning, experts",
    "recurrent_gemma": "RG-LRU, window",
    "lfm2": "short convolution",
    "inkling": "three kinds, relative scores",
    "deepseek_v3": "MLA",
    "llama4": "chunks",
    "gemma3": "window",
    "gemma4-e2b": "shared rows, two head sizes",
    "gpt_oss": "sinks, experts",
}
"""Every mixer and every sort of attention."""


@pytest.mark.parametrize(("device", "family"), everywhere(BFLOAT16, ["lfm2"]))
def test_bfloat16_unified_equals_static(device: str, family: str) -> None:
    assert_sides_agree(device, family, graphs=False)


def assert_sides_agree(device: str, family: str, *, graphs: bool) -> None:
    """Unified memory whose pages move gives the tokens of static memory that nobody touches.

    There is room for everybody on both sides, so they schedule alike; then rounding is alike, and equal means equal.
    More requests than rows, of unlike lengths, so that ends leave holes.
    """
    model_type, values = require(family)
    lengths, news = ((61, 1, 23, 40, 17, 33), (24, 9, 15, 20, 24, 11)) if device == "cuda" else ((9, 1, 3), (2, 6, 4))
    prompts = random_prompts(*lengths)
    served = on_device(tiny(model_type, **values), device, torch.bfloat16, compiled=graphs)
    unified = served.engine(budget=16, graphs=graphs)
    static = served.engine(budget=16, graphs=graphs, walls=list(zip(lengths, news, strict=True)))

    def close_holes(steps: int) -> None:
        if steps % 3 == 0:
            unified.pool.compact()

    ours = greedy(unified, prompts, news, close_holes)
    theirs = greedy(static, prompts, news)
    assert ours == theirs
    assert len({token for tokens in ours for token in tokens}) > 5, "degenerate tokens prove nothing"
    assert sum(unified.pool.moved_pages.values()) > 0 == sum(static.pool.moved_pages.values())
    mine, other = unified.scheduler.counters, static.scheduler.counters
    assert mine.steps == other.steps, "the sides do not schedule alike"
    assert mine.preemptions == other.preemptions == 0


@pytest.mark.parametrize(("device", "family"), everywhere(FAMILIES, ["kimi_linear", "lfm2"]))
def test_float32_tokens_are_transformers(device: str, family: str) -> None:
    """Prompts of unlike length cut into chunks share steps with decodes, one step ahead; every hole is closed at once,
    and now and then a sequence is preempted."""
    lengths, news = ((1, 61, 23, 40), (8, 24, 16, 24)) if device == "cuda" else ((1, 11, 5), (3, 4, 6))
    case = decided(family, lengths, news)
    served = on_device(case.model, device, torch.float32)
    engine = served.engine(budget=9)

    def disturb(steps: int) -> None:
        engine.pool.compact()
        running = engine.scheduler.running
        if steps % 10 == 5 and running:
            engine.scheduler.preempt(running[len(running) // 2])

    assert greedy(engine, case.prompts, news, disturb) == case.expected
    assert engine.scheduler.counters.preemptions > 0
    if len(served.layout.groups) > 1:
        assert sum(engine.pool.moved_pages.values()) > 0
