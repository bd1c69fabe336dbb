"""A model that keeps nothing but states, through the offline API: it has no tokens in its arena to speak of."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from isthmus.engine import capacity
from isthmus.llm import LLM, SamplingParams
from isthmus.server.worker import stats
from tests.engine.toy_tokenizers import byte_level
from tests.model.families import config_of
from tests.model.harness import reference, tiny

PROMPT = [5 + 7 * i % 190 for i in range(39)]
SIZE = 8


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model_type, values = config_of("mamba")
    return tiny(model_type, **{**values, "vocab_size": len(tokenizer())})


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("mamba")
    tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return LLM(str(folder), dtype="float32", pool_bytes=1 << 20, page_size=SIZE, max_num_seqs=4)


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>")


def test_all_continuations_of_a_prompt_and_a_warm_one_are_transformers(model: PreTrainedModel, llm: LLM) -> None:
    expected = reference(model, PROMPT, 9)
    params = SamplingParams(temperature=0, max_tokens=9, n=3, ignore_eos=True)
    for cached in (0, len(PROMPT) // SIZE * SIZE):
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert [one.token_ids for one in output.outputs] == [expected] * 3
        assert output.num_cached_tokens == cached


def test_the_certificate_counts_states(llm: LLM) -> None:
    pool = llm.engine.pool
    count = pool.ids("states").capacity
    assert capacity.concurrent(pool, 511) == count
    text = llm.certificate()
    assert f"virtual page ids: {count:,} of states" in text
    assert f"{count:,} sequences of 511 tokens fit together" in text


def test_the_server_counts_states(llm: LLM) -> None:
    llm.engine.reset_prefix_cache()
    llm.engine.add_request("a", PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    for held in (1, 2):  # its own state; and a snapshot of it at the prompt's last boundary
        llm.engine.step()
        seen = stats(llm.engine, 0)
        assert (seen.ids, seen.id_capacity) == (held, llm.engine.pool.ids("states").capacity)
    llm.engine.abort("a")
    llm.engine.reset_prefix_cache()
    assert stats(llm.engine, 0).ids == 0
