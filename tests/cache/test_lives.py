"""Random lives in arenas that are too small: every equation at every turn, every lookup against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.life import SHAPES, Life, cells_of, prompt


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_random_life(shape: str, page_size: int, data: Any) -> None:
    """Any order of calls in an arena that holds two or three sequences; checks and the oracle at every turn."""
    live_random(shape, page_size, data.draw(st.integers(0, 2**31)), data.draw(st.floats(1.0, 4.0)), 25)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_longer_life_hits_and_evicts(shape: str) -> None:
    hits, evicted, refused = np.sum([live_random(shape, 2, seed, 1.5, 60) for seed in range(6)], axis=0)
    assert hits > 5
    assert evicted > 5
    assert refused > 0


def live_random(shape: str, page_size: int, seed: int, room: float, turns: int) -> tuple[int, int, int]:
    """In an arena for so many of the longest prompts. Returns hit columns, evicted pages and refused steps."""
    life, rng = Life(shape, page_size, int(room * cells_of(shape, page_size, 46))), np.random.default_rng(seed)
    hits = refused = 0
    for _ in range(turns):
        act = rng.random()
        if act < 0.35 and len(life.rows) < 4:
            words = rng.integers(0, 2, rng.integers(1, 4))
            tokens, salt = prompt(*words, tail=int(rng.integers(0, 9))), None if rng.random() < 0.8 else "other"
            match = life.lookup(tokens, salt)
            columns, per_kind = life.expected(tokens, salt)
            assert match.columns == columns
            # A window of one restores even what the cache has never seen: it sees nothing.
            assert match.per_kind == {name: min(n, match.known * page_size) for name, n in per_kind.items()}
            hits += columns
            life.start(tokens, salt)
        elif act < 0.8 and life.rows:
            refused += not go_on(life, rng)
        elif act < 0.9 and life.rows:
            row = life.rows[int(rng.integers(len(life.rows)))]
            if rng.random() < 0.7:
                life.keep(row)
            life.end(row)
        elif act < 0.97:
            most = int(rng.integers(1, 12))
            life.cache.evict(dict.fromkeys(life.tokens, most) or dict.fromkeys(life.states, 1))
        else:
            life.cache.reset()
        life.check()
    return hits, sum(life.cache.evicted.values()), refused


def go_on(life: Life, rng: np.random.Generator) -> bool:
    """One sequence, or everyone who can, computes more. False if there was no room: the youngest was preempted."""
    row = life.rows[int(rng.integers(len(life.rows)))]
    if row.past == len(row.tokens):
        row.tokens.append(int(rng.integers(0, 3)))
    n = int(rng.integers(1, len(row.tokens) - row.past + 1))
    if rng.random() < 0.5:
        n = max(1, (row.past + n) // life.page_size * life.page_size - row.past)  # to a boundary
    if rng.random() < 0.2:
        done = life.step_together([row for row in life.rows if row.past < len(row.tokens)], 1)
    else:
        done = life.step(row, n)
    if not done:
        life.end(life.rows[-1])
    elif rng.random() < 0.6:
        life.keep(row)
    return done
