"""`/v1/chat/completions` through the real client: every field, whole and as a stream; tools and formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.toy_tokenizers import byte_level
from tests.server.running import Server

MESSAGES: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a town",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Köln", "Bonn"]}, "metric": {"type": "boolean"}},
                "required": ["town", "metric"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def test_a_chat_is_the_completion_of_its_template(server: Server, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True).input_ids
    options: dict[str, Any] = {"model": "tiny", "seed": 5, "n": 2}
    want = server.openai.completions.create(prompt=ids, max_tokens=20, **options)
    chat = server.openai.chat.completions.create(messages=MESSAGES, max_completion_tokens=20, **options)
    assert chat.id.startswith("chatcmpl-")
    assert chat.object == "chat.completion"
    assert [choice.message.content for choice in chat.choices] == [choice.text for choice in want.choices]
    assert [choice.finish_reason for choice in chat.choices] == [choice.finish_reason for choice in want.choices]
    assert all(choice.message.role == "assistant" for choice in chat.choices)
    assert all(choice.message.tool_calls is None for choice in chat.choices)
    assert chat.usage.total_tokens == want.usage.total_tokens
    assert chat.usage.prompt_tokens_details.cached_tokens > 0, "the second of the two finds what the first left"


BIAS = {"logit_bias": {"64": 100}}  # the letter a
EOS = {"logit_bias": {str(byte_level().token_to_id("<eos>")): 100}}
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.4}, {"top_p": 0.3}, {"seed": 8}, {"n": 3}, BIAS | {"stop": ["\x01", "aa"]},
    {"frequency_penalty": 2.0}, {"presence_penalty": -2.0}, BIAS, {"top_k": 3}, {"min_p": 0.2},
    {"repetition_penalty": 20.0}, EOS | {"ignore_eos": True},
    BIAS | {"stop_token_ids": [64]}, BIAS | {"stop_token_ids": [64], "min_tokens": 4},
    BIAS | {"stop": "aaa", "include_stop_str_in_output": True},
    EOS | {"ignore_eos": True, "skip_special_tokens": False},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: list(fields)[-1])
@pytest.mark.parametrize("stream", [False, True])
def test_fields_mean_in_a_chat_what_they_mean_in_a_completion(
    server: Server, fields: dict[str, Any], stream: bool
) -> None:
    """Each through the real client, whole and as a stream; what they mean is tested with completions."""
    assert answer_of(server, fields) == answer_of(server, fields, chat=True, stream=stream)
    *_, last = fields
    others = {name: value for name, value in fields.items() if name != last}
    assert answer_of(server, fields) != answer_of(server, others), f"{last} makes no difference: nothing is shown"


def answer_of(
    server: Server, fields: dict[str, Any], *, chat: bool = False, stream: bool = False
) -> list[tuple[str, str]]:
    """Texts and why they ended, of a completion of the chat's tokens or of the chat."""
    ids = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    body = {"seed": 5, "max_tokens": 20, "temperature": 1.0} | fields
    own = set(body) - {"temperature", "top_p", "seed", "n", "stop", "frequency_penalty", "presence_penalty"}
    options: Any = {
        "model": "tiny",
        "extra_body": {name: body.pop(name) for name in own if name != "max_tokens"},
    } | body
    if not chat:
        want = server.openai.completions.create(prompt=ids, **options)
        return [(choice.text, choice.finish_reason) for choice in want.choices]
    if not stream:
        whole = server.openai.chat.completions.create(messages=MESSAGES, **options)
        return [(choice.message.content, choice.finish_reason) for choice in whole.choices]
    count = fields.get("n", 1)
    texts, reasons = [""] * count, [""] * count
    for chunk in server.openai.chat.completions.create(messages=MESSAGES, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return list(zip(texts, reasons, strict=True))


def test_a_chat_shares_its_cache_with_those_of_its_salt(server: Server) -> None:
    messages = [{"role": "user", "content": "a long story, told to nobody else before: " + "and then " * 8}]

    def cached(**fields: Any) -> int:
        body = {"messages": messages, "max_tokens": 2} | fields
        usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0
    assert cached(cache_salt="yours") == 0
    assert cached() == 0


def test_parts_and_developers_and_no_limit(server: Server) -> None:
    content = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    parts = [{"role": "developer", "content": "be short"}, {"role": "user", "content": content}]
    joined = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hel\nlo"}]
    tokens = [server.http.post("/tokenize", json={"messages": m}).json()["tokens"] for m in (parts, joined)]
    assert tokens[0] == tokens[1]
    joined.append({"role": "user", "content": "a" * 1900})
    free = server.http.post("/v1/chat/completions", json={"messages": joined, "ignore_eos": True}).json()
    assert free["usage"]["total_tokens"] == 2048
    assert free["choices"][0]["finish_reason"] == "length"


def test_a_stream_adds_up_to_the_whole(server: Server) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 5, "n": 2, "max_tokens": 30}
    options |= {"logprobs": True, "top_logprobs": 2}
    whole = server.openai.chat.completions.create(**options)
    chunks = list(server.openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    texts, reasons, roles = ["", ""], [None, None], [None, None]
    logprobs: list[list[Any]] = [[], []]
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk"
        choice = chunk.choices[0]
        i = choice.index
        assert reasons[i] is None, "a choice goes on after its end"
        if roles[i] is None:
            roles[i] = choice.delta.role
            assert roles[i] == "assistant", "the first chunk carries the role"
        texts[i] += choice.delta.content or ""
        logprobs[i] += choice.logprobs.content if choice.logprobs else []
        reasons[i] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for found, choice in zip(logprobs, whole.choices, strict=True):
        assert [entry.token for entry in found] == [entry.token for entry in choice.logprobs.content]
        values = [[x.logprob for x in (entry, *entry.top_logprobs)] for entry in found]
        for mine, entry in zip(values, choice.logprobs.content, strict=True):  # one may be cold and the other warm
            assert mine == pytest.approx([x.logprob for x in (entry, *entry.top_logprobs)], abs=1e-4)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_logprobs(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert answer.usage is not None
    assert len(found.content) == answer.usage.completion_tokens
    for entry in found.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the chosen one is the likeliest
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    bare = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True
    )
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bä"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", [1, 2])
def test_an_answer_in_a_json_schema(server: Server, seed: int) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=seed, response_format=shape, max_tokens=60
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"ok", "kind"}
    assert value["ok"] in (True, False)
    assert value["kind"] in ("a", "bä")
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_that_is_some_json_object(server: Server, folder: Path) -> None:
    # A brace is likely, or a random model would go on for long.
    brace = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("}")
    shape: Any = {"type": "json_object"}
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        response_format=shape,
        max_tokens=60,
        logit_bias={str(brace): 50},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def check_calls(calls: Any) -> None:
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "stop":
            assert arguments == {}
        else:
            assert call.function.name == "get_weather"
            assert arguments["town"] in ("Köln", "Bonn")
            assert arguments["metric"] in (True, False)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_that_must_be_called(server: Server, choice: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    options |= {"seed": 3, "max_tokens": 200, "parallel_tool_calls": False}
    whole = server.openai.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls is not None
    check_calls(whole.message.tool_calls)
    assert len(whole.message.tool_calls) == 1
    if choice != "required":
        assert whole.message.tool_calls[0].function.name == "get_weather"
    with server.openai.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert [call.function.arguments for call in final.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_tools_that_may_be_called(server: Server) -> None:
    """Free text, then `<tool_call>`, which a bias makes a random model write."""
    options: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 8, "temperature": 0}
    free = server.http.post("/v1/chat/completions", json=options).json()["choices"][0]
    assert free["message"]["content"]
    assert "tool_calls" not in free["message"]
    none = server.http.post("/v1/chat/completions", json=options | {"tool_choice": "none"}).json()
    plain = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    assert (
        none["choices"][0]["message"]
        == server.http.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]
    )
    assert none["usage"]["prompt_tokens"] < 100, "tools that may not be used are not described"


def test_a_conversation_with_calls_is_rendered(server: Server) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "stop", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == (
        '<eos>user:go<eos>assistant:<tool_call>\n{"name": "stop", "arguments": {"a": 1}}\n</tool_call>'
        "<eos>user:<tool_response>\ndone\n</tool_response><eos>assistant:"
    )


def test_the_demo_chat_model_answers_in_a_schema(tmp_path: Path) -> None:
    from tests.server.running import serve  # noqa: PLC0415

    shape: Any = {"type": "json_schema", "json_schema": {"name": "capital", "schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }}}  # fmt: skip
    with serve("demo-chat", tmp_path, "--pool-bytes", "64m", "--max-model-len", "512") as server:
        ask: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
        answer = server.openai.chat.completions.create(
            model="demo-chat", messages=ask, temperature=0, max_tokens=40, response_format=shape
        )
        assert json.loads(answer.choices[0].message.content or "")["city"]
        words = server.openai.chat.completions.create(
            model="demo-chat", messages=[{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=12
        )
        assert words.choices[0].message.content
        server.wait_idle()
