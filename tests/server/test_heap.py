"""Free memory goes back to the operating system, and not at every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.server.heap import PERIOD, Heap


def test_it_is_trimmed_once_a_period_and_once_at_rest() -> None:
    now, trims = [0.0], list[float]()
    heap = Heap(lambda: trims.append(now[0]), lambda: now[0])
    heap.rest()
    assert trims == [], "nothing has run"
    for second in range(1, 71):
        now[0] = float(second)
        heap.note_step()
    # A period begins with the first step after a trim, so that waiting for work does not count.
    assert trims == [PERIOD + 2, 2 * (PERIOD + 2)]
    heap.rest()
    heap.rest()
    assert trims == [PERIOD + 2, 2 * (PERIOD + 2), 70.0]


def test_the_first_step_after_a_long_wait_is_not_the_one_that_pays() -> None:
    now, trims = [0.0], list[float]()
    heap = Heap(lambda: trims.append(now[0]), lambda: now[0])
    now[0] = 10 * PERIOD
    heap.note_step()
    assert trims == []


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_freed_buffers_between_others_are_given_back() -> None:
    blocks = [np.ones(12_000) for _ in range(2000)]  # 96 kB each: from the heap, not mapped by themselves
    full = resident()
    del blocks[::2]
    heap = Heap()
    heap.note_step()
    heap.rest()
    assert full - resident() > 500 * 96_000
