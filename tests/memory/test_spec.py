"""Byte arithmetic of pages, against numbers worked out by hand and published ones."""

from __future__ import annotations

import pytest

from isthmus.memory import LayerKV, PageSpec, Part, kv_spec, state_spec


def test_gemma3_270m_page() -> None:
    """3 full layers of 1 head x (256 + 256) x 2 B: 3,072 B a token; 15 window layers: 15,360 B."""
    full = kv_spec([LayerKV(i, 1, 256, 256) for i in (5, 11, 17)], 16)
    assert full.token_bytes == 3072
    assert full.page_bytes == 49152
    assert kv_spec([LayerKV(i, 1, 256, 256) for i in range(15)], 16).token_bytes == 15360


def test_gemma4_31b_on_two_ranks_is_10_to_1() -> None:
    """10 full layers, 2 heads a rank, 512 wide; 50 window layers, 8 heads, 256 wide: 40,960 and 409,600 B a token."""
    full = kv_spec([LayerKV(i, 2, 512, 512) for i in range(10)], 1)
    window = kv_spec([LayerKV(i, 8, 256, 256) for i in range(50)], 1)
    assert (full.page_bytes, window.page_bytes) == (40_960, 409_600)


def test_parts_are_layer_major_aligned_and_do_not_overlap() -> None:
    spec = kv_spec([LayerKV(0, 3, 5, 7, "float16"), LayerKV(4, 1, 512, 0)], 3)
    assert [p.name for p in spec.parts] == ["0.k", "0.v", "4.k"]
    assert spec.part("0.k") == Part("0.k", (3, 3, 5), "float16", 0)
    assert spec.part("0.v").offset == 96  # 90 B of K, aligned to 16
    assert spec.part("4.k").offset == 96 + 128
    assert spec.page_bytes == 96 + 128 + 3072
    with pytest.raises(KeyError):
        spec.part("4.v")


def test_a_state_page_keeps_each_parts_dtype() -> None:
    spec = state_spec([("0.conv", (3, 100), "bfloat16"), ("0.recurrent", (4, 8, 8), "float32")])
    assert spec.page_size == 1
    assert spec.part("0.recurrent").offset == 608
    assert spec.page_bytes == 608 + 1024


@pytest.mark.parametrize(
    ("page_size", "page_bytes", "parts", "message"),
    [
        (0, 16, (), "page_size"),
        (1, 0, (), "page_bytes"),
        (1, 24, (), "multiple of 16"),
        (1, 32, (Part("a", (4,), "float32", 0), Part("b", (4,), "float32", 8)), "overlaps"),
        (1, 16, (Part("a", (8,), "float32", 0),), "past the page"),
    ],
)
def test_impossible_specs_are_refused(page_size: int, page_bytes: int, parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageSpec(page_size, page_bytes, parts)
