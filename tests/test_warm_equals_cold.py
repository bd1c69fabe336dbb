"""A prefix from the cache gives the tokens that computing it gives, at every length, on every kind of model we serve.

Lengths go from one token to three windows and two pages; a window's pages are evicted in between, so that hits are
cut everywhere. The model is tiny and in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from isthmus.llm import LLM
from isthmus.params import SamplingParams
from tests.model.tiny_gguf import VOCABULARY, WINDOW, tiny_model, write_gguf

NEW = 4


@pytest.fixture(scope="module", params=["gemma3", "llama"])
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Windows of 8 tokens and full layers, or full layers alone."""
    path = tmp_path_factory.mktemp(request.param) / "tiny.gguf"
    write_gguf(path, request.param, tiny_model(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISTHMUS_CACHE", str(path.parent / "cache"))
        yield path


def make(gguf: Path, page_size: int, *, caching: bool) -> LLM:
    return LLM(
        str(gguf), dtype="float32", page_size=page_size, pool_bytes=8 << 20, max_num_batched_tokens=256,
        enable_prefix_caching=caching,
    )  # fmt: skip


def complete(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Greedy tokens and cached prompt tokens, one prompt after the other."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    found = []
    for prompt in prompts:
        (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        llm.engine.pool.check()
        cache = llm.engine.scheduler.cache
        if cache is not None:
            cache.check()
        found.append((output.outputs[0].token_ids, output.num_cached_tokens))
    return found


def evict_window_pages(llm: LLM, rng: np.random.Generator) -> None:
    """Drop the window page of some cached nodes, as memory pressure from another kind would."""
    pool, cache = llm.engine.pool, llm.engine.scheduler.cache
    assert cache is not None
    holdings = cache._holdings
    for name in cache.roles.windows:
        slots = holdings.nodes.live()
        slots = slots[holdings.bound(name, slots) & holdings.unused(name, slots)]
        chosen = slots[rng.random(len(slots)) < 0.15]
        if len(chosen):
            pool.unbind(name, holdings.forget(name, chosen))
    cache._ranking = None
    cache._epoch += 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tokens_after_a_hit_are_those_of_a_cold_run(gguf: Path, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    longest = 3 * WINDOW + 2 * page_size
    tokens = rng.integers(3, VOCABULARY, longest).tolist()
    prompts = [tokens[:n] for n in range(1, longest + 1)]
    cold = complete(make(gguf, page_size, caching=False), prompts)
    assert all(cached == 0 for _, cached in cold)
    warm = make(gguf, page_size, caching=True)
    first = complete(warm, [tokens])  # fills the cache with the longest
    assert first[0][0] == cold[-1][0]
    hits = set()
    for _ in range(2):
        for i in rng.permutation(len(prompts)).tolist():
            evict_window_pages(warm, rng)
            (answer,) = complete(warm, [prompts[i]])
            assert answer[0] == cold[i][0], f"{len(prompts[i])} tokens, {answer[1]} of them from the cache"
            assert answer[1] <= len(prompts[i]) - 1
            hits.add(answer[1])
    assert len(hits) > longest // page_size // 2, f"hits of few lengths only: {sorted(hits)}"


def test_several_at_once_share_while_they_run(gguf: Path) -> None:
    """Prompts with a common start, batched: pages are shared, found twice and deduplicated under way."""
    rng = np.random.default_rng(5)
    start = rng.integers(3, VOCABULARY, 40).tolist()
    prompts = [start[: int(rng.integers(5, 41))] + rng.integers(3, VOCABULARY, 3).tolist() for _ in range(24)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = []
    for caching in (False, True):
        llm = make(gguf, 4, caching=caching)
        batch = [{"prompt_token_ids": p} for p in prompts]
        rounds = [[o.outputs[0].token_ids for o in llm.generate(batch, params, use_tqdm=False)] for _ in range(2)]
        assert rounds[0] == rounds[1]
        answers.append(rounds[0])
    assert answers[0] == answers[1]
