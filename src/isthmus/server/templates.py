"""Chat templates: Jinja as Transformers runs it (same environment, same names), without importing it or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ContextReference, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isthmus.errors import ConfigError


class TemplateError(ValueError):
    """A conversation that a template cannot render. One line."""


class ChatTemplate:
    """One or several named templates of a model. ConfigError when one is not valid Jinja."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        self._tokens = dict(special_tokens)
        named = {"default": source} if isinstance(source, str) else dict(source)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"{origin}: the chat template is not valid Jinja: {_line(error)}") from error
        self._sources = named

    def speaks_tools(self) -> bool:
        """Does it write tools in the form `<tool_call>{...}</tool_call>`?"""
        source = self._sources.get("tool_use") or self._sources.get("default", "")
        return "<tool_call>" in source and "tools" in source

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, extra: Mapping[str, Any]
    ) -> str:
        """The conversation as text that ends where the assistant's answer begins. TemplateError when it refuses."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise TemplateError(f"the model has chat templates {sorted(self._templates)} and none is the default")
        variables = {**self._tokens, **extra, "messages": messages, "tools": tools, "documents": None}
        try:
            return template.render(**variables, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's makers: it raises what it likes
            raise TemplateError(f"the chat template refuses the conversation: {_line(error)}") from error


def read_template(path: str) -> str:
    """The text of `--chat-template FILE`. ConfigError when it cannot be read."""
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read ({_line(error)})") from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text", [ContextReference()]), [], [], body).set_lineno(line)

    def _text(self, context: Any, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
