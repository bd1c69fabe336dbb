"""The offline API on a tiny hybrid model with random weights."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isthmus.engine.runner import Runner
from isthmus.errors import ConfigError
from isthmus.llm import LLM, SamplingParams
from isthmus.memory.journal import DEFAULT_BYTES
from isthmus.memory.replay import Replay
from isthmus.params import RequestError
from tests.llm.small import GREEDY, build

TEMPLATE = "{% for m in messages %}<eos>{{ m.role }}:{{ m.content }}{% endfor %}<eos>assistant:"


def reference(folder: Path, ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def test_text_and_ids_mixed_come_back_in_order_with_transformers_tokens(folder: Path, llm: LLM) -> None:
    ids = llm.tokenizer("the cat sat").input_ids
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    seen: list[tuple[int, bool]] = []
    outputs = llm.generate(
        ["the cat sat", {"prompt_token_ids": ids * 4}, {"prompt": "the"}],
        [GREEDY, short, GREEDY],
        use_tqdm=False,
        on_output=lambda i, output: seen.append((i, output.finished)),
    )
    assert [o.prompt for o in outputs] == ["the cat sat", None, "the"]
    for output, count in zip(outputs, (20, 3, 20), strict=True):
        assert output.outputs[0].token_ids == reference(folder, output.prompt_token_ids, count)
        assert output.outputs[0].finish_reason == "length"
        whole = llm.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert llm.tokenizer.decode(output.prompt_token_ids) + output.outputs[0].text == whole
    assert sorted(i for i, finished in seen if finished) == [0, 1, 2]
    assert seen.count((0, False)) == 19


@pytest.mark.parametrize("settings", [{"memory": "static"}, {"page_size": 1}, {"pool_bytes": 40_000, "page_size": 1}])
def test_tokens_do_not_depend_on_memory(folder: Path, llm: LLM, settings: dict[str, Any]) -> None:
    prompts = ["the cat sat on the mat " * n for n in (1, 3, 2, 1, 4)]
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    other = build(folder, **settings)
    assert [o.outputs[0].token_ids for o in other.generate(prompts, GREEDY, use_tqdm=False)] == want
    assert other.usage().live == 0


def test_seeds_hold_alone_and_in_company_and_n_sequences_differ(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate("the cat", params, use_tqdm=False)
    _, together = llm.generate(["the mat", "the cat"], [SamplingParams(n=2), params], use_tqdm=False)
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in together.outputs]
    assert len({tuple(o.token_ids) for o in alone.outputs}) == 3


def test_stream_yields_the_same_text_and_stopping_early_frees_everything(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, stop=["zzzz"], ignore_eos=True)
    (whole,) = llm.generate("the cat", params, use_tqdm=False)
    pieces = list(llm.stream("the cat", params))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for _ in llm.stream("the cat", params):
        break
    assert llm.usage().live == 0


def test_streams_and_batches_interleave(llm: LLM) -> None:
    (want,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    stream = llm.stream("the cat", GREEDY)
    text = next(stream).outputs[0].text
    (other,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert other.outputs[0].token_ids == want.outputs[0].token_ids
    assert text + "".join(piece.outputs[0].text for piece in stream) == want.outputs[0].text


def test_logprobs_are_of_the_model(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, logit_bias={5: 100.0})
    (output,) = llm.generate("the cat", params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([output.prompt_token_ids])).logits[0, -1].log_softmax(-1)
    (entry,) = output.outputs[0].logprobs or []
    assert output.outputs[0].token_ids == [5]
    assert list(entry) == [5, *want.topk(2).indices.tolist()]
    assert [value.logprob for value in entry.values()] == pytest.approx(want[list(entry)].tolist(), abs=1e-4)


def test_a_journal_ends_with_its_engine(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "life.journal"
    llm = build(folder, journal=str(path))
    llm.generate("the cat", GREEDY, use_tqdm=False)
    assert path.stat().st_size >= DEFAULT_BYTES
    del llm
    gc.collect()
    assert path.stat().st_size < DEFAULT_BYTES, "what the ring did not use is given back"
    assert [*Replay(path)], "and it replays"


def test_one_bad_prompt_starts_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: the prompt has 300 tokens and max_model_len is 256"):
        llm.generate(["the cat", {"prompt_token_ids": [1] * 300}], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate({"prompt_token_ids": []}, GREEDY, use_tqdm=False)
    strange: Any
    for strange in ([3], {"prompt": 5}, {"prompt": None}, [None], {}):
        with pytest.raises(RequestError, match=r"^a prompt is text"):
            llm.generate(strange, GREEDY, use_tqdm=False)
    for strange in (5, None, 1.5):
        with pytest.raises(RequestError, match=r"^prompts are one prompt or a list"):
            llm.generate(strange, GREEDY, use_tqdm=False)
    for strange in (5, "abc", None, {1: 2}):
        with pytest.raises(RequestError, match=r"^prompt_token_ids are a list"):
            llm.generate({"prompt_token_ids": strange}, GREEDY, use_tqdm=False)
    for strange in (["a"], [1.9], [True], [None]):
        with pytest.raises(RequestError, match="where a token id is due"):
            llm.generate({"prompt_token_ids": strange}, GREEDY, use_tqdm=False)
    for strange in (5, [5], "greedy"):
        with pytest.raises(ConfigError, match=r"^sampling_params are one SamplingParams or a list"):
            llm.generate(["the cat"], strange, use_tqdm=False)
    with pytest.raises(ConfigError, match="2 sampling_params for 1 prompts"):
        llm.generate("the cat", [GREEDY, GREEDY], use_tqdm=False)


def test_chat_renders_the_template_without_adding_special_tokens_twice(llm: LLM) -> None:
    question = [{"role": "user", "content": "the cat"}]
    with pytest.raises(RequestError, match="has no chat template"):
        llm.chat(question, GREEDY, use_tqdm=False)
    llm.tokenizer.chat_template = TEMPLATE
    try:
        (output,) = llm.chat(question, GREEDY, use_tqdm=False)
        two = llm.chat([question, question], GREEDY, use_tqdm=False)
    finally:
        llm.tokenizer.chat_template = None
    assert output.prompt == "<eos>user:the cat<eos>assistant:"
    assert output.prompt_token_ids.count(llm.tokenizer.eos_token_id) == 2
    assert [o.outputs[0].token_ids for o in two] == [output.outputs[0].token_ids] * 2


def test_what_a_chat_template_refuses_is_one_line_with_its_words(llm: LLM) -> None:
    strange: Any
    cases: list[tuple[str, Any, str]] = [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}], "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": 5}], "unsupported operand"),
        ("{% for m in messages", [{"role": "user", "content": "x"}], "end of template"),
    ]
    try:
        for template, messages, words in cases:
            llm.tokenizer.chat_template = template
            with pytest.raises(RequestError, match=f"^the chat template of .* refuses the messages: .*{words}"):
                llm.chat(messages, GREEDY, use_tqdm=False)
        for strange in ("hello", 5, None):
            with pytest.raises(RequestError, match=r"^messages are a list of objects"):
                llm.chat(strange, GREEDY, use_tqdm=False)
    finally:
        llm.tokenizer.chat_template = None


def test_lengths_count_every_sequence_of_a_request(llm: LLM) -> None:
    ids = {"prompt_token_ids": [5] * 7}
    lengths = llm.lengths([ids, ids], [SamplingParams(n=3, max_tokens=4), SamplingParams(max_tokens=9)])
    assert lengths == [(7, 4)] * 3 + [(7, 9)]


def test_logits_that_are_no_numbers_end_their_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = llm.engine.executor
    assert isinstance(runner, Runner)
    sampler, calls = runner.sampler, 0

    def broken(logits: torch.Tensor, samples: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            logits = logits.clone()
            logits[0, 3] = torch.nan
        return sampler(logits, samples)

    monkeypatch.setattr(runner, "sampler", broken)
    first, second = llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False)
    assert first.outputs[0].finish_reason == "abort"
    assert "use --dtype bfloat16 or float32" in str(first.outputs[0].stop_reason)
    assert len(first.outputs[0].token_ids) < 20 == len(second.outputs[0].token_ids)
    assert "NaN" in caplog.text


def test_settings_that_do_nothing_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(folder)
    assert caplog.messages == []
    build(folder, gpu_memory_utilization=0.9, static_workload=(8, 8))
    assert [m.split()[0] for m in caplog.messages] == ["--gpu-memory-utilization", "--static-workload"]
    caplog.clear()
    build(folder, memory="static", static_workload=(8, 8), static_split={"full": 0.5, "window": 0.5})
    assert [m.split(":")[0] for m in caplog.messages] == [
        "--static-workload is ignored with --static-split, which says what it would find"
    ]
    caplog.clear()
    build(folder, memory="static", static_workload=(8, 8))
    assert caplog.messages == []
