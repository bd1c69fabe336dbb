"""Models and workloads small enough to simulate in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WINDOWS = {
    "name": "windows",
    "max_model_len": 8192,
    "groups": [
        {"name": "full", "kind": "append", "page_bytes": 16384, "page_size": 16, "pair_flops": 4096},
        {"name": "window", "kind": "window", "page_bytes": 65536, "page_size": 16, "window": 128, "pair_flops": 16384},
    ],
    "shape": {"layers": 24, "dense_bytes": 2e9, "token_flops": 2e9},
}
STATES = {
    "name": "states",
    "max_model_len": 65536,
    "groups": [
        {"name": "full", "kind": "append", "page_bytes": 16384, "page_size": 16},
        {"name": "state", "kind": "state", "page_bytes": 1 << 20},
    ],
    "shape": {"layers": 24, "dense_bytes": 2e9, "token_flops": 2e9},
}


@pytest.fixture(params=[WINDOWS, STATES], ids=["windows", "states"])
def groups_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model with windows, then one with states, as `--groups` reads it."""
    return write(tmp_path, request.param)


def write(folder: Path, model: dict[str, Any]) -> Path:
    """A file for `--groups`."""
    path = folder / f"{model['name']}.json"
    path.write_text(json.dumps(model))
    return path
