"""`/v1/completions` through the real client: every field, whole and as a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.running import Server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(reference: Any, ids: list[int], count: int) -> list[int]:
    reference.generation_config.eos_token_id = None
    tokens = torch.tensor([ids])
    out = reference.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def test_a_completion_is_the_models(server: Server, tokenizer: Any, reference: Any) -> None:
    ids = tokenizer("the cat sat").input_ids
    answer = server.openai.completions.create(model="tiny", prompt="the cat sat", **GREEDY)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.choices[0].text == tokenizer.decode(greedy(reference, ids, 12))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(ids), 12, len(ids) + 12,
    )  # fmt: skip
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_prompts_of_every_form_are_numbered_together(server: Server, tokenizer: Any) -> None:
    texts = ["the cat", "a mat"]
    ids = [tokenizer(text).input_ids for text in texts]
    one = [server.openai.completions.create(model="tiny", prompt=text, **GREEDY).choices[0].text for text in texts]
    for prompt in (texts, ids):
        answer = server.openai.completions.create(model="tiny", prompt=prompt, n=2, **GREEDY)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [one[0], one[0], one[1], one[1]]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 48
    assert server.openai.completions.create(model="tiny", prompt=ids[1], **GREEDY).choices[0].text == one[1]


def test_a_stream_adds_up_to_the_whole(server: Server) -> None:
    options: dict[str, Any] = {"prompt": ["the cat", "dog"], "n": 2, "seed": 7, "max_tokens": 30, "logprobs": 1}
    whole = server.openai.completions.create(model="tiny", **options)
    stream = server.openai.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **options
    )
    texts, reasons = [""] * 4, [None] * 4
    tokens: list[list[float]] = [[] for _ in range(4)]
    chunks = list(stream)
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        assert chunk.id == chunks[0].id
        choice = chunk.choices[0]
        assert reasons[choice.index] is None, "a choice goes on after its end"
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
        tokens[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for values, choice in zip(tokens, whole.choices, strict=True):
        assert choice.logprobs is not None
        assert values == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_the_events_of_a_stream(server: Server) -> None:
    body = {"prompt": "the cat", "max_tokens": 5, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = "".join(answer.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert events.count("data: [DONE]") == 1
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_token_edges(server: Server, stream: bool) -> None:
    text = server.openai.completions.create(model="tiny", prompt="the", **GREEDY | {"max_tokens": 40}).choices[0].text
    stop = text[9:12]  # most tokens are single bytes, so it spans several
    end = text.index(stop)
    body = {"prompt": "the", "stop": ["\x00\x00", stop], "stream": stream, "temperature": 0, "ignore_eos": True}
    for include in (False, True):
        answer = server.http.post(
            "/v1/completions", json=body | {"include_stop_str_in_output": include, "max_tokens": 40}
        )
        if stream:
            events = [e.removeprefix("data: ") for e in answer.text.split("\n\n")[:-2]]
            choices = [json.loads(event)["choices"][0] for event in events]
        else:
            choices = answer.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == text[: end + len(stop) * include]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == stop


def test_logprobs(server: Server, tokenizer: Any, reference: Any) -> None:
    ids = tokenizer("the cat sat").input_ids
    choice = server.openai.completions.create(model="tiny", prompt=ids, logprobs=2, **GREEDY).choices[0]
    tokens = greedy(reference, ids, 12)
    want = reference(torch.tensor([ids + tokens])).logits[0].log_softmax(-1)
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.tokens == [tokenizer.decode([token]) for token in tokens]
    offsets = [0]
    for token in found.tokens:
        offsets.append(offsets[-1] + len(token))
    assert found.text_offset == offsets[:-1]
    for i, token in enumerate(tokens):
        assert found.token_logprobs[i] == pytest.approx(want[len(ids) + i - 1, token].item(), abs=1e-4)
        assert max(found.top_logprobs[i].values()) == found.token_logprobs[i]
    sparse = server.openai.completions.create(model="tiny", prompt=ids, logprobs=0, **GREEDY).choices[0].logprobs
    assert sparse is not None
    assert sparse.token_logprobs == pytest.approx(found.token_logprobs)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(
    server: Server, tokenizer: Any, reference: Any, max_tokens: int, stream: bool
) -> None:
    prompts = ["the cat sat on the mat", "Bär"]
    body = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
    body |= {"ignore_eos": True, "stream": stream}
    answer = server.http.post("/v1/completions", json=body)
    if stream:
        events = [json.loads(e.removeprefix("data: ")) for e in answer.text.split("\n\n")[:-2]]
        pieces: list[list[Any]] = [[e["choices"][0] for e in events if e["choices"][0]["index"] == i] for i in (0, 1)]
    else:
        pieces = [[choice] for choice in answer.json()["choices"]]
        assert answer.json()["usage"]["completion_tokens"] == 2 * max_tokens
    for prompt, parts in zip(prompts, pieces, strict=True):
        ids = tokenizer(prompt).input_ids
        tokens = ids + greedy(reference, ids, max_tokens or 1)[:max_tokens]
        want = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert "".join(part["text"] for part in parts) == tokenizer.decode(tokens)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found = {name: [x for part in parts for x in part["logprobs"][name]] for name in names}
        assert found["tokens"] == [tokenizer.decode([token]) for token in tokens]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        for i in range(1, len(tokens)):
            value = want[i - 1, tokens[i]].item()
            assert found["token_logprobs"][i] == pytest.approx(value, abs=1e-4)
            # What evaluation harnesses call greedy: the token's own value is the largest of the top ones.
            is_greedy = want[i - 1].argmax().item() == tokens[i]
            assert (found["token_logprobs"][i] == max(found["top_logprobs"][i].values())) == is_greedy
        assert parts[-1]["finish_reason"] == "length"


def test_echo_alone(server: Server, tokenizer: Any) -> None:
    plain = server.openai.completions.create(model="tiny", prompt="the cat", **GREEDY).choices[0].text
    for prompt in ("the cat", tokenizer("the cat").input_ids):
        answer = server.openai.completions.create(model="tiny", prompt=prompt, echo=True, **GREEDY)
        assert answer.choices[0].text == "the cat" + plain
        assert answer.choices[0].logprobs is None


def test_sampling_fields_reach_the_model(server: Server, tokenizer: Any) -> None:
    def text(**changes: Any) -> str:
        extra = {"extra_body": {"ignore_eos": True} | changes.pop("extra_body", {})}
        options: dict[str, Any] = {"model": "tiny", "prompt": "the", "seed": 3, "max_tokens": 10}
        return str(server.openai.completions.create(**options | extra | changes).choices[0].text)

    best, drawn = text(temperature=0), text()
    assert drawn == text()
    assert drawn != text(seed=4)
    assert text(extra_body={"top_k": 1}) == best
    assert text(top_p=1e-9) == best
    assert text(extra_body={"min_p": 1.0}) == best
    letter = tokenizer.convert_tokens_to_ids("a")
    assert text(logit_bias={str(letter): 100}, temperature=0) == "a" * 10
    assert text(logit_bias={str(letter): 100}, temperature=0, frequency_penalty=2).count("a") == 10
    long: dict[str, Any] = {"max_tokens": 40}
    for changes in ({"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 50.0}}):
        assert len(set(text(temperature=0, **long, **changes))) > len(set(text(temperature=0, **long)))
    assert text(presence_penalty=2, **long) != text(**long)


def test_ends(server: Server, tokenizer: Any) -> None:
    eos, letter = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    body = {"prompt": "the", "temperature": 0, "max_tokens": 6, "logit_bias": {str(eos): 100}}
    ended = server.http.post("/v1/completions", json=body).json()
    assert ended["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip
    assert ended["usage"]["completion_tokens"] == 1
    later = server.http.post("/v1/completions", json=body | {"min_tokens": 3}).json()
    assert later["usage"]["completion_tokens"] == 4
    body["logit_bias"] = {str(letter): 100}
    by_id = server.http.post("/v1/completions", json=body | {"stop_token_ids": [letter]}).json()["choices"][0]
    assert (by_id["text"], by_id["finish_reason"], by_id["stop_reason"]) == ("", "stop", letter)
    body["logit_bias"] = {str(eos): 100}
    spelled = body | {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 2}
    assert server.http.post("/v1/completions", json=spelled).json()["choices"][0]["text"] == "<eos><eos>"


def test_tokenize_and_back(server: Server, tokenizer: Any) -> None:
    text = "the cat 🙂"
    found = server.http.post("/tokenize", json={"prompt": text}).json()
    ids = tokenizer(text).input_ids
    assert found == {"count": len(ids), "max_model_len": 2048, "tokens": ids}
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    chat = [{"role": "user", "content": "hi"}]
    want = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True).input_ids
    assert server.http.post("/tokenize", json={"messages": chat}).json()["tokens"] == want
