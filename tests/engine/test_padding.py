"""Lanes that fill a graph of decodes are shared out among its programs, whose own items stay theirs."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.engine.padding import padded_items
from isthmus.kernels.plan import plan_decode


@pytest.mark.parametrize(("lanes", "size", "programs"), [(5, 8, 4), (1, 2, 264), (60, 64, 16), (0, 3, 2), (3, 3, 2)])
def test_padding_goes_round_and_everybody_keeps_what_they_have(lanes: int, size: int, programs: int) -> None:
    at = np.arange(lanes, dtype=np.int32)
    work = plan_decode(at, at, np.zeros_like(at), 70 * at + 1, programs=programs)
    padded = padded_items(work, lanes, size)
    assert padded.items.dtype == padded.bounds.dtype == np.int32
    assert padded.slots == work.slots
    fills = []
    for p in range(programs):
        mine = padded.items[padded.bounds[p] : padded.bounds[p + 1]]
        live = mine[mine[:, 0] < lanes]
        assert live.tolist() == work.items[work.bounds[p] : work.bounds[p + 1]].tolist()
        fills.append(mine[mine[:, 0] >= lanes])
    every = np.concatenate(fills)
    assert sorted(every[:, 0].tolist()) == list(range(lanes, size))
    assert (every[:, [2, 3]] == 0).all(), "they read nothing"
    assert (every[:, 6] == 1).all(), "and leave no part"
    assert max(map(len, fills)) <= -(-(size - lanes) // programs)
