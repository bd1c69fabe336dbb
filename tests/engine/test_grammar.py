"""Output that follows a grammar, and log probabilities of prompts, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM

from isthmus.llm import LLM, SamplingParams
from isthmus.params import RequestError
from tests.server.tiny_model import write_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bb"]}, "n": {"enum": [1, 22]}},
    "required": ["ok", "kind", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def build(folder: Path, **changes: Any) -> LLM:
    settings = {"dtype": "float32", "pool_bytes": 1 << 20, "page_size": 4, "max_num_seqs": 8}
    return LLM(str(folder), **settings | {"max_num_batched_tokens": 16} | changes)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return build(folder)


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["ok", "kind", "n"]
    assert value["ok"] in (True, False)
    assert value["kind"] in ("a", "bb")
    assert value["n"] in (1, 22)


def test_sampled_output_follows_the_schema_beside_free_output(llm: LLM) -> None:
    bound = SamplingParams(n=3, seed=1, max_tokens=80, grammar=GRAMMAR)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = llm.generate("the cat", free, use_tqdm=False)[0].outputs[0].token_ids
    follows, beside = llm.generate(["the cat", "the cat"], [bound, free], use_tqdm=False)
    for output in follows.outputs:
        check(output.text)
        assert output.finish_reason == "stop"
    assert beside.outputs[0].token_ids == alone


def test_a_preempted_sequence_goes_on_in_its_grammar(folder: Path) -> None:
    llm = build(folder, max_num_batched_tokens=64)
    calm = llm.generate(["the cat"] * 4, SamplingParams(seed=5, max_tokens=80, grammar=GRAMMAR), use_tqdm=False)
    batch = iter(range(1000))

    def disturb(index: int, output: Any) -> None:
        running = llm.engine.scheduler.running
        if len(running) > 1 and next(batch) % 7 == 3:
            llm.engine.scheduler.preempt(running[-1])

    params = SamplingParams(seed=5, max_tokens=80, grammar=GRAMMAR)
    shaken = llm.generate(["the cat"] * 4, params, use_tqdm=False, on_output=disturb)
    assert llm.engine.scheduler.counters.preemptions > 0
    assert [o.outputs[0].text for o in shaken] == [o.outputs[0].text for o in calm]


def test_a_grammar_that_is_none_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="grammar: "):
        llm.generate("x", SamplingParams(grammar=LLMatcher.grammar_from_lark("start: nothing")), use_tqdm=False)
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(grammar=GRAMMAR, ignore_eos=True)
    assert not llm.engine.has_work


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_those_of_the_whole_forward(folder: Path, llm: LLM, n: int) -> None:
    text = "the cat sat on the mat. Der Bär läuft über die Brücke!"  # longer than a step takes
    params = SamplingParams(n=n, temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=1)
    other = SamplingParams(temperature=0, max_tokens=8)
    _, output, _ = llm.generate(["x", text, "beside it"], [other, params, other], use_tqdm=False)
    ids, want = output.prompt_token_ids, reference(folder, output.prompt_token_ids)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    for i, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry[ids[i]].logprob == pytest.approx(want[i - 1, ids[i]].item(), abs=1e-4)
        best = want[i - 1].topk(2)
        assert [token for token, x in sorted(entry.items(), key=lambda x: x[1].rank)][:2] == best.indices.tolist()
    assert llm.usage().live == 0


def test_prompt_logprobs_in_small_blocks(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = llm.generate("the cat sat on", params, use_tqdm=False)[0].prompt_logprobs
    monkeypatch.setattr("isthmus.engine.runner._SCORE_BYTES", 1)
    blocks = llm.generate("the cat sat on", params, use_tqdm=False)[0].prompt_logprobs
    assert whole is not None
    assert blocks is not None
    for a, b in zip(whole[1:], blocks[1:], strict=True):
        assert a is not None
        assert b is not None
        for token in a:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-5)
            assert a[token].rank == b[token].rank
