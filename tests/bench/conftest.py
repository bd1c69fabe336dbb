"""A tiny model for benches of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.tiny_gguf import tiny_model, write_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, "gemma3", tiny_model("gemma3"))
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
