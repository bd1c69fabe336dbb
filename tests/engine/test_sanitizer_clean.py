"""No false alarm: whatever requests do, checked memory gives the same tokens and finds nothing."""

from __future__ import annotations

import random

import pytest

from isthmus.params import SamplingParams
from tests.engine.sanitized import engine_for, family, in_use, scripted_engine, serve
from tests.engine.scripted import expected
from tests.engine.test_device_runner import random_prompts
from tests.model.harness import paged, reference


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("arena_bytes", [11 << 10, 1 << 15])
def test_churn_is_clean(overlap: bool, prefix_caching: bool, arena_bytes: int) -> None:
    """Full attention, windows and states; shared prefixes, forks, aborts, preemption, compaction, eviction."""
    engine, _ = scripted_engine(overlap=overlap, arena_bytes=arena_bytes, prefix_caching=prefix_caching)
    draw = random.Random(arena_bytes)
    heads = [[draw.randrange(97) for _ in range(draw.randrange(4, 40))] for _ in range(4)]
    wanted: dict[str, list[int]] = {}
    got: dict[tuple[str, int], list[int]] = {}
    for step in range(400):
        if step < 300 and draw.random() < 0.3:
            prompt = draw.choice(heads) + [draw.randrange(97) for _ in range(draw.randrange(1, 9))]
            n, most = draw.choice([1, 1, 2]), draw.randrange(1, 20)
            salt = draw.choice([None, None, "tenant"])
            params = SamplingParams(temperature=0, n=n, max_tokens=most, ignore_eos=True)
            engine.add_request(str(step), prompt, params, cache_salt=salt)
            wanted[str(step)] = expected(prompt, most)
        if wanted and draw.random() < 0.03:
            engine.abort(draw.choice(list(wanted)))
        if draw.random() < 0.1:
            engine.pool.compact()
        if draw.random() < 0.05 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        if draw.random() < 0.02:
            engine.reset_prefix_cache()
        for output in engine.step():
            for part in output.outputs:
                got.setdefault((output.request_id, part.index), []).extend(part.token_ids)
                assert part.finish_reason in (None, "length")
    while engine.has_work:
        engine.step()
    assert engine.sanitizer is not None
    assert not engine.sanitizer.faults
    assert sum(engine.pool.moved_pages.values()) > 0
    assert in_use(engine) == 0
    assert all(tokens == wanted[name][: len(tokens)] for (name, _), tokens in got.items())
    assert len(got) > 60


@pytest.mark.parametrize(
    ("name", "check", "overlap"),
    [
        ("gemma3", "audit", False),
        ("gemma3", "full", True),
        ("lfm2", "full", False),
        ("qwen3_5", "full", True),
        ("mamba2", "full", True),
    ],
)
def test_a_model_gives_transformers_tokens(name: str, check: str, overlap: bool) -> None:
    """Windows, convolutions, recurrent states, states alone; the second round starts from what the first one left."""
    model = family(name)
    prompts = {str(i): prompt for i, prompt in enumerate(random_prompts(21, 9, 1, 25, 14))}
    wanted = {name: reference(model, prompt, 9) for name, prompt in prompts.items()}
    engine, _ = engine_for(paged(model), check=check, overlap=overlap, arena_bytes=1 << 20, prefix_caching=True)
    for _ in range(2):
        outputs = serve(engine, prompts, 9, lambda _: engine.pool.compact())
        assert {name: output.token_ids for name, output in outputs.items()} == wanted
    assert engine.sanitizer is not None
    assert not engine.sanitizer.faults
