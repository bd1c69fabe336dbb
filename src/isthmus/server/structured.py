"""What an answer must look like, as a grammar for llguidance: a JSON schema, or calls of tools.

Tools are called in the form that the most widely trained templates use, whatever the model:

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

The grammar fixes every space of it, so `ToolParser` can tell the parts apart while they stream.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from isthmus.server.errors import bad_request
from isthmus.server.protocol import ChatRequest, JsonSchemaFormat, NamedTool, TextFormat, Tool

# One way to write spaces: a small model allowed any may write them until max_tokens.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\n\{"name": "([^"]+)", "arguments": ')
_TAIL = "}\n" + _CLOSE


def grammar_of(request: ChatRequest) -> str | None:
    """The grammar a chat's answer must follow; None where it is free. ApiError 400 when it cannot be one."""
    shape, tools = request.response_format, active_tools(request)
    if shape is None or isinstance(shape, TextFormat):
        if not tools:
            return None
        return _checked(_tool_grammar(request, tools), "tools", _llguidance("tools"))
    if tools:
        raise bad_request("response_format: cannot be combined with tools: leave one of them out", "response_format")
    library = _llguidance("response_format")
    schema: dict[str, Any] = {"type": "object"}
    if isinstance(shape, JsonSchemaFormat):
        schema = shape.json_schema.schema_ or {}
    grammar = library.LLMatcher.grammar_from_json_schema(_spaced(schema))
    return _checked(grammar, "response_format", library)


def active_tools(request: ChatRequest) -> list[Tool]:
    """The tools the model may use in this answer."""
    return [] if request.tool_choice == "none" else list(request.tools or [])


def _tool_grammar(request: ChatRequest, tools: Sequence[Tool]) -> str:
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
    bodies = [
        f"f{i}: {json.dumps(_head(tool.function.name))} %json {json.dumps(_parameters(tool))} {json.dumps(_TAIL)}"
        for i, tool in enumerate(tools)
    ]
    many = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    calls = f"body ({json.dumps(chr(10) + _OPEN)} body)*" if many else "body"
    forced = request.tool_choice not in (None, "auto")
    start = f'start: "{_OPEN}" calls' if forced else f'start: TEXT | lead calls\nlead[lazy]: TEXT "{_OPEN}"'
    names = " | ".join(f"f{i}" for i in range(len(tools)))
    return "\n".join(["%llguidance {}", start, f"calls: {calls}", f"body: {names}", *bodies, r"TEXT: /(.|\n)*/"])


def _head(name: str) -> str:
    return f'\n{{"name": "{name}", "arguments": '


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.function.parameters or {"properties": {}, "additionalProperties": False})
    return _spaced({"type": "object"} | parameters)


def _spaced(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"x-guidance": _SPACING}


def _llguidance(param: str) -> ModuleType:
    try:
        import llguidance  # noqa: PLC0415 (an extra)
    except ImportError:
        raise bad_request(
            f"{param}: this server was installed without it: pip install 'isthmus[structured]'", param
        ) from None
    return llguidance


def _checked(grammar: str, param: str, library: ModuleType) -> str:
    problem = library.LLMatcher.validate_grammar(grammar, None)
    if problem:
        raise bad_request(f"{param}: the schema cannot be enforced: {problem.splitlines()[0][:300]}", param)
    return grammar


@dataclass
class CallPart:
    """A tool call, or more of its arguments."""

    index: int
    name: str | None = None  # on its first part
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")  # of the first part


class ToolParser:
    """Splits the text of one continuation into content and tool calls as it comes."""

    def __init__(self) -> None:
        self.count = 0  # calls so far
        self._held = ""
        self._inside = False
        self._named = False

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallPart]]:
        """`(content, calls)` that are certain now; all of it when the text is over."""
        self._held += text
        content = ""
        calls: list[CallPart] = []
        while True:
            if not self._inside:
                before, found, after = self._held.partition(_OPEN)
                keep = 0 if found or last else _overlap(before, _OPEN)
                if not self.count:  # between calls there is a newline that is no content
                    content += before[: len(before) - keep]
                self._held = after if found else before[len(before) - keep :]
                if not found:
                    return content, calls
                self._inside, self._named = True, False
            if not self._named:
                head = _HEAD.match(self._held)
                if head is None:
                    if last:  # cut off before the call had a name: then it is text
                        content, self._held = content + _OPEN + self._held, ""
                    return content, calls
                calls.append(CallPart(self.count, head[1]))
                self.count += 1
                self._named, self._held = True, self._held[head.end() :]
            arguments, found, after = self._held.partition(_TAIL)
            keep = 0 if found or last else _overlap(arguments, _TAIL)
            if len(arguments) > keep:
                calls.append(CallPart(self.count - 1, None, arguments[: len(arguments) - keep]))
            self._held = after if found else arguments[len(arguments) - keep :]
            if not found:
                return content, calls
            self._inside = False


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
