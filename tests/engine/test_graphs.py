"""Sizes of CUDA graphs: few enough to capture, close enough to waste little."""

from __future__ import annotations

import pytest

from isthmus.engine.graphs import lane_counts, token_counts


@pytest.mark.parametrize("most", [1, 8, 24, 100, 150, 2048, 8192])
def test_a_step_with_chunks_is_padded_by_a_fifth_of_its_graph_a_small_one_by_as_much_again(most: int) -> None:
    sizes = token_counts(most)
    for tokens in range(1, most + 1):
        size = next(n for n in sizes if n >= tokens)
        assert size - tokens < (max(8, tokens) if tokens < 128 else size / 5)


def test_small_sizes_are_an_octave_apart_but_for_the_largest() -> None:
    assert token_counts(8192)[:7] == (8, 16, 32, 64, 128, 160, 192)
    assert token_counts(100) == (8, 16, 32, 64, 112)
    assert token_counts(24) == (8, 16, 24)


def test_decodes_have_sizes_of_their_own_and_every_small_one_where_asked() -> None:
    assert lane_counts(256) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert lane_counts(512)[-5:] == (256, 320, 384, 448, 512)
    assert lane_counts(64, 6) == (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
    assert lane_counts(3, 8) == (1, 2, 3)
    assert lane_counts(1) == (1,)
    assert lane_counts(1, 8) == (1,)
