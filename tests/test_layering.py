"""Imports go down one list, and what plans without a device imports no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "isthmus"

ORDER = (
    ("__main__",),
    ("cli",),
    ("generate", "chat", "evaluate"),
    # These two measure and serve what `LLM` builds, so they stand above it.
    ("bench",),
    ("server",),
    ("llm",),
    ("sim",),
    ("replay",),
    ("plan",),
    ("top",),
    ("top_screen",),
    ("top_parts", "top_stream", "endpoint"),
    ("flags", "env", "progress"),
    ("presets",),
    ("engine",),
    ("model",),
    ("kernels",),
    ("cache",),
    ("memory",),
    ("params",),
    ("errors",),
    ("__init__",),
)
"""Top to bottom: a module imports from its own layer and from those below."""

RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

TORCH_FREE = (
    "isthmus.memory",
    "isthmus.cache",
    "isthmus.engine.scheduler",
    "isthmus.engine.sequence",
    "isthmus.engine.step",
    "isthmus.engine.config",
    "isthmus.engine.capacity",
    "isthmus.engine.core",
    "isthmus.params",
    "isthmus.presets",
    "isthmus.plan.verb",
    *(f"isthmus.{name}" for name in ("sim", "plan", "replay") if list(SOURCE.glob(f"{name}*"))),
)

BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
importlib.import_module(sys.argv[1])
"""


def layer(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """`(line, layer)` of everything taken from the package, wherever in the file it is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "isthmus":
                yield node.lineno, parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    own = layer(path)
    assert own in RANK, f"{own} has no place in the order of layers"
    for line, name in imported(ast.parse(path.read_text())):
        assert RANK[own] <= RANK[name], f"{path.relative_to(SOURCE)}:{line} imports {name}, which is above {own}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_planning_needs_no_framework(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


def test_the_blocker_blocks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "isthmus.engine.sampler"], capture_output=True, text=True, check=False
    )
    assert "torch must not be imported here" in done.stderr
