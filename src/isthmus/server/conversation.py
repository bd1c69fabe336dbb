"""Messages to a prompt: the model's chat template, with tools in its own words or in ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.server.errors import bad_request
from isthmus.server.protocol import Message, Tool, ToolCall
from isthmus.server.speller import Speller
from isthmus.server.templates import TemplateError

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}


async def render(
    speller: Speller, messages: Sequence[Message], tools: Sequence[Tool], extra: Mapping[str, Any] | None
) -> list[int]:
    """Token ids of the conversation. ApiError 400 when there is no template or it refuses."""
    template = speller.template
    if template is None:
        raise bad_request(speller.no_template, "messages", "no_chat_template")
    reserved = _RESERVED & set(extra or {})
    if reserved:
        name = min(reserved)
        raise bad_request(f"chat_template_kwargs: {name!r} is set by the server", "chat_template_kwargs")
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    native = template.speaks_tools()
    turns = [_turn(message, i, native=native) for i, message in enumerate(messages)]
    if functions and not native:
        turns = _with_tools(turns, functions)

    def work() -> list[int]:
        text = template.render(turns, functions if functions and native else None, extra or {})
        # The template writes the special tokens itself, so the tokenizer must not add them again.
        return speller.encode(text, add_special_tokens=False)

    try:
        return await speller.aside(work)
    except TemplateError as error:
        raise bad_request(f"messages: {error}", "messages") from None


def _turn(message: Message, index: int, *, native: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text()}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if message.reasoning_content is not None:
        turn["thinking"] = message.reasoning_content  # as some templates call it
    calls = [_call(call, index) for call in message.tool_calls or []]
    if native:
        return turn | ({"tool_calls": calls} if calls else {})
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    turn["content"] = "\n".join([turn["content"], *written] if turn["content"] else written)
    return turn if calls else turn | {"content": message.text()}


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError as error:
        raise bad_request(
            f"messages.{index}.tool_calls: the arguments of {call.function.name!r:.80} are not JSON: {error}",
            f"messages.{index}.tool_calls",
        ) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _with_tools(turns: list[dict[str, Any]], functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tell a model whose template knows no tools of this form about them in the system message."""
    schemas = "\n".join(json.dumps(function["function"], ensure_ascii=False) for function in functions)
    text = (
        "You may call functions. These are their signatures:\n"
        f"<tools>\n{schemas}\n</tools>\n"
        "To call one, answer with\n"
        '<tool_call>\n{"name": <function name>, "arguments": <arguments as a JSON object>}\n</tool_call>'
    )
    if turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
