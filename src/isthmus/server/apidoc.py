"""docs/api.md, written from the code: `python -m isthmus.server.apidoc > docs/api.md`.

Endpoints, fields and statuses come from the app's own OpenAPI document, flags from the config dataclasses. A test fails
when the file says anything else. Needs neither a model nor torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from isthmus.engine.config import LAYERS, Setting, parse_size, setting_of
from isthmus.params import SamplingParams
from isthmus.server.app import Front, build_app
from isthmus.server.config import ServerConfig
from isthmus.server.engine_client import EngineClient
from isthmus.server.metrics import Metrics
from isthmus.server.middleware import OPEN_FOLDER, OPEN_PATHS
from isthmus.server.protocol import Sampling

Schema = Mapping[str, Any]

_FLAGS: Mapping[str, type] = {
    "Server": ServerConfig,
    "Model": LAYERS["model"],
    "Memory": LAYERS["memory"],
    "Scheduler": LAYERS["scheduler"],
    "Device": LAYERS["device"],
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_LENGTHS = {"minItems": "at least", "maxItems": "at most", "minLength": "at least", "maxLength": "at most"}


def main() -> int:
    """Print the page."""
    sys.stdout.write(page())
    return 0


def page() -> str:
    """The whole of docs/api.md."""
    document = openapi()
    parts = [_head(), _endpoints(document), _statuses(document), *_models(document["components"]["schemas"])]
    parts += ["## Flags\n\n" + _flags_head(), *(_flags(title, config) for title, config in _FLAGS.items())]
    return "\n\n".join(parts) + "\n"


def openapi() -> dict[str, Any]:
    """The server's OpenAPI document, from an app without an engine."""
    config = ServerConfig()
    metrics = Metrics(lambda: None)
    client = EngineClient({}, metrics, max_queue=config.max_queue, request_timeout=config.request_timeout)
    return build_app(Front(config, client, metrics)).openapi()


# -- endpoints ----------------------------------------------------------------------------------------------


def _head() -> str:
    return (
        "# API\n\n"
        "Written by `python -m isthmus.server.apidoc > docs/api.md` from the code: do not edit it.\n"
        "How to use it is in [serving.md](serving.md). A running server gives the same as an OpenAPI document under\n"
        "`/openapi.json`.\n\n"
        "## Endpoints"
    )


def _endpoints(document: Schema) -> str:
    rows = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            rows.append(
                (
                    f"`{method.upper()} {path}`",
                    operation["description"],
                    _type(body) if body else "",
                    ", ".join(_answer(status, found) for status, found in operation["responses"].items()),
                )
            )
    open_paths = ", ".join(f"`{path}`" for path in sorted(OPEN_PATHS))
    note = (
        f"\n\nWhere a key is set, every path but {open_paths} and the dashboard's files under `{OPEN_FOLDER}` answers "
        "401 without it."
    )
    return _table(("request", "what", "body", "answers"), rows) + note


def _answer(status: str, response: Schema) -> str:
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    return f"{status} {_type(schema)}" if status == "200" and "$ref" in schema else status


def _statuses(document: Schema) -> str:
    found: dict[str, str] = {}
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status != "200":
                    found[status] = response["description"]
    rows = [(f"`{status}`", found[status]) for status in sorted(found)]
    return f"## Statuses other than 200\n\nThe body is an {_link('ErrorResponse')}.\n\n" + _table(("", "meaning"), rows)


# -- fields -------------------------------------------------------------------------------------------------


def _models(schemas: Schema) -> Iterator[str]:
    yield (
        "## Bodies\n\n"
        "A request with a field that is not listed is refused with 400, and so is a value of another type.\n"
        "null means the same as leaving the field out. The default is what that amounts to; a dash: nothing is set."
    )
    defaults = _sampling_defaults()
    for name, schema in schemas.items():
        is_request = schema.get("additionalProperties") is False
        text = [f"### {name}", *([schema["description"]] if "description" in schema else [])]
        fields = {name: field for name, field in schema["properties"].items() if field.get("type") != "null"}
        rows = [_field(name, field, schema, defaults, is_request) for name, field in fields.items()]
        if rows:
            text.append(_table(("field", "type", "default") if is_request else ("field", "type"), rows))
        refused = [f"`{name}`" for name in schema["properties"] if name not in fields]
        if refused:
            text.append(f"Not supported, refused unless null: {', '.join(refused)}.")
        yield "\n\n".join(text)


def _field(name: str, field: Schema, schema: Schema, defaults: Mapping[str, Any], is_request: bool) -> tuple[str, ...]:
    told = f"; {field['description']}" if "description" in field else ""
    if not is_request:  # what a request may leave out is null in an answer
        is_nullable = {"type": "null"} in field.get("anyOf", ())
        return f"`{name}`", _type(field) + (" or null" if is_nullable else "") + told
    row = (f"`{name}`", _type(field) + told)
    if name in schema.get("required", ()):
        return (*row, "required")
    value = field.get("default", defaults.get(name))
    return (*row, "–" if value is None else f"`{_json(value)}`")


def _sampling_defaults() -> dict[str, Any]:
    """What the shared fields mean when they are left out: what an empty request becomes for the engine."""
    params = Sampling().sampling()
    names = {spec.name for spec in dataclasses.fields(SamplingParams)} & set(Sampling.model_fields)
    return {name: value for name in names if (value := getattr(params, name)) not in (None, (), {})}


def _type(schema: Schema) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_type(part) for part in schema[union] if part.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return _limited(f"list of {_items(schema['items'])}", schema, "entries")
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, Mapping) else "object"
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in _BOUNDS.items() if name in schema]
    if "pattern" in schema:
        bounds.append(f"`{schema['pattern']}`")
    return _limited(", ".join([kind, *bounds]), schema, "characters")


def _items(schema: Schema) -> str:
    text = _type(schema)
    if "](" in text:
        return text
    return f"({text})" if " " in text else f"{text}s"


def _limited(text: str, schema: Schema, unit: str) -> str:
    limits = [f"{word} {schema[name]} {unit}" for name, word in _LENGTHS.items() if name in schema]
    return (
        ", ".join([text, *limits])
        .replace("at least 1 characters", "not empty")
        .replace("at least 1 entries", "not empty")
    )


def _number(value: float) -> str:
    whole = int(value)
    power = abs(whole).bit_length() - 1
    if abs(whole) >= 1 << 16 and abs(whole) == 1 << power:
        return f"{'-' if whole < 0 else ''}2^{power}"
    return str(whole) if whole == value else str(value)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _json(value: Any) -> str:
    return json.dumps(value)


# -- flags --------------------------------------------------------------------------------------------------


def _flags_head() -> str:
    return (
        "Of `isthmus serve`. Unknown flags and abbreviations are errors. `--config FILE` reads the same settings from\n"
        "YAML, under the names of the second column; the command line wins. Sizes take k, m and g, powers of 1024.\n"
        "The flags of the last column are accepted and mean the same; `--enable-unified-memory` is `--memory unified`."
    )


def _flags(title: str, config: type) -> str:
    hints = typing.get_type_hints(config)
    rows = []
    for spec in dataclasses.fields(config):
        if "setting" not in spec.metadata:
            continue
        setting = setting_of(spec)
        flag = setting.flag if setting.flag.startswith("-") else setting.flag.upper()
        aliases = ", ".join(f"`{alias}`" for alias in (*setting.aliases, *(flag for flag, _ in setting.shorthands)))
        default = _default(spec.default, setting)
        rows.append((f"`{flag}`", f"`{spec.name}`", _value(setting, hints[spec.name]), default, setting.help, aliases))
    head = ("flag", "in YAML", "value", "default", "what", "also accepted")
    return f"### {title}\n\n" + _table(head, rows)


def _value(setting: Setting, kind: Any) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.parse is parse_size:
        return "size"
    if setting.parse is not None:  # a notation of its own, which its help shows
        return "list"
    names = {bool: "switch", int: "integer", float: "number", str: "text"}
    return next(text for option, text in names.items() if option in (typing.get_args(kind) or (kind,)))


def _default(value: Any, setting: Setting) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    if setting.parse is parse_size and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value >> 20}m`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
