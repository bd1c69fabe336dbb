"""docs/api.md says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.flags import Parser, add_engine_flags, engine_settings
from isthmus.server import apidoc, protocol
from isthmus.server.config import ServerConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def page() -> str:
    return apidoc.page()


def section(page: str, title: str) -> str:
    """The text under a heading."""
    found = re.search(rf"^### {title}\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {title}"
    return found[1]


def test_the_page_is_what_the_code_says(page: str) -> None:
    assert PAGE.read_text() == page, "run: python -m isthmus.server.apidoc > docs/api.md"


@pytest.mark.parametrize("model", [protocol.ChatRequest, protocol.CompletionRequest, protocol.Message])
def test_every_field_is_there(page: str, model: Any) -> None:
    text = section(page, model.__name__)
    assert all(f"`{name}`" in text for name in model.model_fields)


def test_fields_tell_their_range_and_what_leaving_them_out_means(page: str) -> None:
    chat = section(page, "ChatRequest")
    assert "| `n` | integer, ≥ 1, ≤ 128 | `1` |" in chat
    assert "| `temperature` | number, ≥ 0, ≤ 100 | `1.0` |" in chat
    assert re.search(r"Not supported.*`service_tier`", chat)
    assert "| `max_tokens` | integer, ≥ 0, ≤ 2^31 | `16` |" in section(page, "CompletionRequest")


def test_every_flag_and_alias_is_there(page: str) -> None:
    parser = Parser(prog="isthmus")
    add_engine_flags(parser, ServerConfig)
    accepted = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    flags = page.partition("\n## Flags\n")[2]
    assert {flag for flag in accepted if not re.search(rf"`{flag}\b", flags)} == set()
    assert all(f"| `{name}` |" in flags for name in engine_settings(ServerConfig))


def test_links_lead_somewhere(page: str) -> None:
    titles = {title.lower() for title in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= titles


def test_writing_it_needs_no_torch() -> None:
    code = (
        "import sys, isthmus.server.apidoc as a; a.page(); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
