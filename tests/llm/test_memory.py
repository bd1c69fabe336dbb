"""What the offline API says of its memory, walls in it and back, and settings that are impossible."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from isthmus.engine import capacity
from isthmus.engine.runner import Runner
from isthmus.errors import ConfigError
from isthmus.llm import LLM
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.params import RequestError
from tests.llm.small import GREEDY, build


def test_one_arena_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    old, seen = weakref.ref(llm.engine.executor), []

    def build_beside(*args: Any, **settings: Any) -> Runner:
        seen.append(old())
        return Runner(*args, **settings)

    monkeypatch.setattr("isthmus.engine.backends.Runner", build_beside)
    with llm.static([(8, 8)]):
        pass
    assert seen == [None, None]


def test_walls_that_are_impossible_leave_the_engine_as_it_was(llm: LLM) -> None:
    engine = llm.engine
    with pytest.raises(ConfigError, match="which do not fit its wall of 1 bytes"), llm.static({"full": 1, "window": 1}):
        pass
    assert llm.engine is engine


def test_static_walls_for_a_workload_and_back(llm: LLM) -> None:
    prompts = ["the cat sat " * 3] * 3
    lengths = llm.lengths(prompts, GREEDY)
    assert lengths == [(len(llm.tokenizer(prompts[0]).input_ids), 20)] * 3
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with llm.static(lengths):
        walls = llm.engine.pool.walls
        assert walls is not None
        assert "walls: " in llm.certificate()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == want
    with llm.static(walls):
        assert llm.engine.pool.walls == walls
    assert llm.engine.pool.walls is None


def test_the_certificate_says_what_fits(llm: LLM) -> None:
    text = llm.certificate()
    count = capacity.concurrent(llm.engine.pool, 255)
    assert f"{count:,} sequences of 255 tokens fit together" in text
    assert capacity.fits(llm.engine.pool, 255, count)
    assert not capacity.fits(llm.engine.pool, 255, count + 1)
    total = capacity.total_tokens(llm.engine.pool, 255)
    assert count * 255 <= total < (count + 1) * 255
    assert f"{total:,} tokens fit" in text


def test_impossible_memory_is_one_line_with_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--pool-bytes 2,000 is smaller than one sequence.*needs [0-9,]+ bytes"):
        build(folder, pool_bytes=2000)
    with pytest.raises(ConfigError, match=r"^one sequence of 256 tokens needs [0-9,]+ bytes.*do not fit the arena"):
        build(folder, pool_bytes=20_000, max_model_len=256)
    with pytest.raises(ConfigError, match="more than the model's context of 256"):
        build(folder, max_model_len=257)
    with pytest.raises(ConfigError, match=r"^--pool-bytes 1,073,741,824,000,000 is more than the [0-9,]+ bytes"):
        build(folder, pool_bytes=1_000_000 << 30)
    with pytest.raises(
        ConfigError, match=r"^one sequence of 256 tokens needs 64 pages of 4 tokens, over --max-total-t"
    ):
        build(folder, max_total_tokens=20, max_model_len=256)
    walls = {"full": 0.999, "window": 0.0001}
    with pytest.raises(ConfigError, match=r"needs [0-9,]+ bytes of pages of group window, which do not fit its wall"):
        build(folder, memory="static", static_split=walls)
    with pytest.raises(ConfigError, match="raise --pool-bytes or lower --static-workload"):
        build(folder, memory="static", pool_bytes=20_000, static_workload=(1 << 20, 5))
    with pytest.raises(ConfigError, match="--static-split must give a share to each of full, window"):
        build(folder, memory="static", static_split={"full": 1.0})
    with pytest.raises(ConfigError, match="unknown setting 'max_model_length'"):
        build(folder, max_model_length=3)


def test_without_max_model_len_a_small_arena_shortens_the_context(folder: Path) -> None:
    llm = build(folder, pool_bytes=20_000)
    longest = llm.engine.scheduler.max_model_len
    assert 20 < longest < 256
    ids = [1] * (longest - 5)
    (output,) = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_a_cap_on_tokens_is_what_the_certificate_and_the_refusals_speak_of(folder: Path) -> None:
    llm = build(folder, max_total_tokens=42)
    assert llm.engine.scheduler.max_model_len == 41  # ten pages of 4, and the last token is not cached
    text = llm.certificate()
    assert "1 sequences of 40 tokens fit together" in text
    assert "40 tokens fit in sequences of up to 41 under --max-total-tokens 42" in text
    (output,) = llm.generate({"prompt_token_ids": [1] * 30}, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 11
    with pytest.raises(RequestError, match="max_model_len is 41"):
        llm.generate({"prompt_token_ids": [1] * 41}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("arena", [1 << 36, (1 << 36) - 1, 1 << 25])
def test_shares_that_are_one_but_for_a_rounding_error_fit(arena: int) -> None:
    members = [Group("full", opaque_spec(1 << 20, 4), "append"), Group("window", opaque_spec(1 << 21, 4), "window", 9)]
    for full, window in ((0.5, 0.5 + 1e-9), (1 / 3, 2 / 3), (1e-9, 1.0)):
        walls = capacity.split_walls(members, arena, {"full": full, "window": window})
        Pool(arena, members, walls=walls)
        assert walls["full"] == pytest.approx(full * (arena - (1 << 21)), abs=100)


def test_best_walls_share_the_arena_by_what_sequences_hold() -> None:
    members = [
        Group("full", opaque_spec(64, 4), "append"),
        Group("window", opaque_spec(320, 4), "window", 64),
    ]
    short, long = (capacity.best_walls(members, 1 << 20, [(n, 16)]) for n in (16, 2048))
    assert short["window"] / short["full"] == pytest.approx(5, rel=0.05)
    assert long["full"] > long["window"]
    for walls, length in ((short, 32), (long, 2064)):
        assert sum(walls.values()) <= (1 << 20) - 320
        unified = capacity.concurrent(Pool(1 << 20, members), length)
        assert 0.85 * unified <= capacity.concurrent(Pool(1 << 20, members, walls=walls), length) <= unified
    skewed = capacity.best_walls(members, 1 << 16, [(16, 16)] * 99 + [(2048, 16)])
    assert capacity.fits(Pool(1 << 16, members, walls=skewed), 2064)
    with pytest.raises(ConfigError, match="cannot be split so that a request of 40,016 tokens fits"):
        capacity.best_walls(members, 1 << 16, [(40_000, 16)])
