"""Chat templates render as Transformers renders them; a model without one says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from isthmus.errors import ConfigError
from isthmus.server import conversation
from isthmus.server.errors import ApiError
from isthmus.server.protocol import ChatRequest
from isthmus.server.speller import Speller
from isthmus.server.templates import ChatTemplate, TemplateError
from isthmus.server.wire import ModelInfo
from tests.server.tiny_model import TEMPLATE

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "dö <it>", "parameters": {"type": "object"}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "<a>"]}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hé <b>\n"},
    {"role": "assistant", "content": "ok", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
]
EACH, END = "{% for m in messages %}", "{% endfor %}"
SOURCES = {
    "plain": TEMPLATE,
    "blocks are trimmed": f"  {{% if 1 %}}\n    {EACH}\n  {{{{ m['role'] }}}}\n    {END}\n  {{% endif %}}\nend\n",
    "json": "{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=2) }}{% endfor %}{{ messages | tojson }}",
    "loop controls": EACH + "{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}" + END,
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}" + END,
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}" + END + "{{ ns.n }}",
    "time": "{{ strftime_now('%Y') }}",
    "tokens and extras": "{{ bos_token }}{{ eos_token }}{{ mood }}{% if documents %}d{% endif %}{{ x is defined }}",
    "calls": EACH + "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}" + END,
}


@pytest.mark.parametrize("name", SOURCES)
def test_templates_render_as_in_transformers(folder: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    for chat in (CHAT[:2], CHAT):
        want = tokenizer.apply_chat_template(
            chat, chat_template=SOURCES[name], tools=[TOOL], mood="good", add_generation_prompt=True, tokenize=False
        )
        assert ChatTemplate(SOURCES[name], tokens, "x").render(chat, [TOOL], {"mood": "good"}) == want


def test_what_a_template_refuses_is_one_line() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('users\nfirst') }}{% endif %}{{ 1 / n }}"
    template = ChatTemplate(source, {}, "x")
    with pytest.raises(TemplateError, match=r"^the chat template refuses the conversation: users$"):
        template.render(CHAT, None, {})
    with pytest.raises(TemplateError, match="division by zero"):
        template.render(CHAT[1:], None, {"n": 0})
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}, "x").render(CHAT, None, {})
    with pytest.raises(ConfigError, match=r"f\.jinja: the chat template is not valid Jinja"):
        ChatTemplate("{% if %}", {}, "f.jinja")


def test_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t"}, {}, "x")
    assert template.render(CHAT, None, {}) == "d"
    assert template.render(CHAT, [TOOL], {}) == "t"
    with pytest.raises(TemplateError, match="none is the default"):
        ChatTemplate({"rag": "r"}, {}, "x").render(CHAT, None, {})


@pytest.fixture
def info(folder: Path) -> ModelInfo:
    return ModelInfo("tiny", str(folder / "tokenizer.json"), None, {"eos_token": "<eos>"}, [264], 266, 2048, 8)


async def render(speller: Speller, **more: Any) -> str:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | more)
    ids = await conversation.render(speller, request.messages, request.tools or [], request.chat_template_kwargs)
    return speller.decode(ids)


async def problem(speller: Speller) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await render(speller)
    return caught.value


def run(work: Any) -> Any:
    import asyncio  # noqa: PLC0415

    return asyncio.run(work)


def test_a_model_without_a_template(info: ModelInfo, tmp_path: Path) -> None:
    error = run(problem(Speller(info, None)))
    assert (error.status, error.code) == (400, "no_chat_template")
    assert "--chat-template" in error.message
    info.chat_template = "{% broken"
    assert "not valid Jinja" in run(problem(Speller(info, None))).message
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    assert run(render(Speller(info, str(file)))) == "<eos>user:hi<eos>assistant:"
    file.write_text("{% broken")
    with pytest.raises(ConfigError, match=r"own\.jinja"):
        Speller(info, str(file))


def test_tools_are_described_by_the_template_or_by_us(info: ModelInfo) -> None:
    info.chat_template = "{% for t in tools %}<tool_call>{{ t.function.name }}{% endfor %}"
    assert run(render(Speller(info, None), tools=[TOOL])) == "<tool_call>f"
    info.chat_template = TEMPLATE
    text = run(render(Speller(info, None), tools=[TOOL]))
    assert text.startswith("<eos>system:You may call functions.")
    assert '"description": "dö <it>"' in text
    assert text.endswith("<eos>user:hi<eos>assistant:")
