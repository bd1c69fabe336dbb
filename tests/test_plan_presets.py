"""The presets have the shapes of their models: parameters as published, bytes worked out by hand from their numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from isthmus.engine.config import EngineConfig
from isthmus.plan.shape import load
from isthmus.presets import PRESETS, find

K = 1024


@dataclass(frozen=True)
class Bytes:
    """What a model caches, in bytes: of a token in each group, and of a sequence's state."""

    full: int
    window: int = 0
    state: int = 0
    size: int | None = None  # of the window


def rows(layers: int, heads: int, head_dim: int) -> int:
    """Keys and values in bfloat16."""
    return layers * heads * 2 * head_dim * 2


def conv(width: int, channels: int, itemsize: int = 2) -> int:
    """The last inputs of a convolution of that width, in bfloat16 if not said otherwise."""
    return (width - 1) * channels * itemsize


EXPECTED = {
    "gemma-3-270m": Bytes(rows(3, 1, 256), rows(15, 1, 256), size=512),
    "gemma-3-1b": Bytes(rows(4, 1, 256), rows(22, 1, 256), size=512),
    "gemma-3-4b": Bytes(rows(5, 4, 256), rows(29, 4, 256), size=1024),
    "gemma-3-12b": Bytes(rows(8, 8, 256), rows(40, 8, 256), size=1024),
    "gemma-3-27b": Bytes(rows(10, 16, 128), rows(52, 16, 128), size=1024),
    "gemma-4-31b-it": Bytes(rows(10, 4, 512), rows(50, 16, 256), size=1024),
    "gemma-4-E2B-it": Bytes(rows(3, 1, 512), rows(12, 1, 256), size=512),
    "gpt-oss-20b": Bytes(rows(12, 8, 64), rows(12, 8, 64), size=128),
    "LFM2-1.2B": Bytes(rows(6, 8, 64), state=10 * conv(3, 2048)),
    # Recurrent states are in float32: [heads, key dim, value dim], or [heads, head dim, state size].
    "Qwen3.5-0.8B": Bytes(rows(6, 2, 256), state=18 * (conv(4, 3 * 16 * 128) + 16 * 128 * 128 * 4)),
    "Qwen3.5-wide": Bytes(rows(6, 2, 256), state=18 * (conv(4, 3 * 16 * 128) + 16 * 128 * 128 * 4)),
    "Kimi-Linear-48B-A3B": Bytes(7 * (512 + 64) * 2, state=20 * (conv(4, 3 * 32 * 128) + 32 * 128 * 128 * 4)),
    "Nemotron-H-8B": Bytes(rows(4, 8, 128), state=24 * (conv(4, 128 * 64 + 2 * 8 * 128) + 128 * 64 * 128 * 4)),
    "Granite-4-H-Tiny": Bytes(rows(4, 4, 128), state=36 * (conv(4, 48 * 64 + 2 * 128) + 48 * 64 * 128 * 4)),
    # Four convolutions in each layer, over keys, values and twice the residual stream, computed in float32.
    "Inkling-Small": Bytes(rows(7, 8, 128), rows(35, 8, 128), state=42 * conv(4, 2 * 8 * 128 + 2 * 4096), size=512),
}


def test_every_preset_is_here() -> None:
    assert set(EXPECTED) == set(PRESETS)


def test_names_in_any_case() -> None:
    found = find("kimi-linear-48b-a3b")
    assert found is not None
    assert found[0] == "Kimi-Linear-48B-A3B"
    assert find("google/gemma-3-1b") is None


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_and_parameters(name: str) -> None:
    shape, expected = load(EngineConfig.build(model=name)), EXPECTED[name]
    assert shape.weight_bytes / 2 == pytest.approx(PRESETS[name].parameters, rel=0.015)
    assert shape.source == PRESETS[name].source
    groups = {group.name: group for group in shape.layout.groups}
    assert set(groups) == {key for key in ("full", "window", "state") if getattr(expected, key)}
    assert groups["full"].spec.token_bytes == expected.full
    if expected.window:
        assert (groups["window"].spec.token_bytes, groups["window"].window) == (expected.window, expected.size)
    if expected.state:
        assert groups["state"].spec.page_bytes == expected.state
