"""Long random lives: a seeded soak over every shape, and hypothesis state machines that shrink what they find."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus.memory import Pool
from tests.memory.helpers import Traffic, Twin, groups_of

RATIOS = {"10:1": (1, 10), "2:1": (1, 2), "1:1": (1, 1), "state 1500:1": (1, 1)}
TOPOLOGIES = ("ends", "one float", "two floats")
PAGE_SIZES = (1, 16, 64)
OPERATIONS = 28_000  # pages per case; 36 cases make a million


def shape(ratio: str, topology: str) -> dict[str, int]:
    """Cells per token of each group."""
    full, window = RATIOS[ratio]
    if ratio == "state 1500:1":
        return {"state": 1500, "full": 1} | {
            "ends": {},
            "one float": {"window": 1},
            "two floats": {"window1": 1, "window2": 2},
        }[topology]
    return {"full": full} | {
        "ends": {"window": window},
        "one float": {"state": 7 * window, "window": window},
        "two floats": {"state": 7 * window, "window1": window, "window2": 3},
    }[topology]


@pytest.mark.parametrize(("ratio", "topology", "page_size"), list(product(RATIOS, TOPOLOGIES, PAGE_SIZES)))
def test_soak(ratio: str, topology: str, page_size: int) -> None:
    """Every id is handed out at least five times; every equation holds after every operation; no byte is lost."""
    sizes = {n: u * (page_size if n[0] != "s" else 1) for n, u in shape(ratio, topology).items()}
    if ratio == "state 1500:1":
        sizes["state"] *= page_size
    cells = max(700 * sizes["full"], 6 * sizes.get("state", 0) + 400 * sizes["full"]) + max(sizes.values())
    pool = Pool(cells * 16, groups_of(sizes, page_size))
    traffic = Traffic(pool, seed=1)
    twin = Twin(pool) if cells < 50_000 else None
    counts = {space: np.zeros(ids.capacity + 1, np.int64) for space, ids in pool.spaces.items()}
    step = 0
    while traffic.operations < OPERATIONS or any(c[1:].min() < 5 for c in counts.values()):
        step += 1
        assert step < 20_000, f"ids are not visited: {[int(c[1:].min()) for c in counts.values()]}"
        before = {space: ids.minted for space, ids in pool.spaces.items()}
        heads = {space: ids.peek(min(ids.free, 200)) for space, ids in pool.spaces.items()}
        want = traffic.demand(160)
        if "state" in want:
            want["state"] = min(want["state"], max(3, pool.ids("states").capacity // 60))
        if not traffic.grant(want):
            traffic.release(0.5)
        for space, ids in pool.spaces.items():
            counts[space][np.asarray(heads[space][: ids.minted - before[space]])] += 1
        traffic.unbind(0.3)
        if step % 3 == 0:
            traffic.release(0.2)
        if step % 17 == 0:
            traffic.pin()
        if step % 50 == 0:
            pool.compact()
        pool.check()
        delta = pool.take_delta()
        if twin is not None:
            twin.apply(delta)
            if step % 8 == 0:
                twin.verify()
    assert traffic.granted
    assert traffic.refused


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls on a small pool of any shape; `check` and the byte twin after each."""

    @initialize(
        sizes=st.sampled_from(
            [
                {"full": 2, "window": 1},
                {"full": 1, "window": 10},
                {"state": 15, "full": 1},
                {"state": 6, "window": 3, "full": 2},
                {"state": 4, "window1": 1, "window2": 3, "full": 2},
                {"window1": 2, "window2": 5},
            ]
        ),
        cells=st.integers(40, 160),
        seed=st.integers(0, 2**31),
    )
    def start(self, sizes: dict[str, int], cells: int, seed: int) -> None:
        self.pool = Pool(cells * 16, groups_of(sizes))
        self.traffic = Traffic(self.pool, seed)
        self.twin = Twin(self.pool)

    @rule(most=st.integers(0, 12))
    def allocate(self, most: int) -> None:
        self.traffic.allocate(most)

    @rule(share=st.floats(0, 1))
    def release(self, share: float) -> None:
        self.traffic.release(share)

    @rule(share=st.floats(0, 1))
    def unbind(self, share: float) -> None:
        self.traffic.unbind(share)

    @rule()
    def pin(self) -> None:
        self.traffic.pin()

    @rule()
    def rebind(self) -> None:
        self.twin.apply(self.pool.take_delta())
        done = self.traffic.rebind()
        if done is not None:
            self.twin.rebound(*done)

    @rule()
    def compact(self) -> None:
        self.pool.compact()
        if not any(region.pins for region in self.pool.regions.values()):
            assert all(not len(region.holes) for region in self.pool.regions.values())

    @precondition(lambda self: "states" in self.pool.spaces and self.pool.ids("states").live >= 2)
    @rule()
    def fork(self) -> None:
        source, destination = np.asarray(self.pool.ids("states").live_ids())[:2]
        self.twin.apply(self.pool.take_delta())
        self.pool.copy("state", [source], [destination])
        self.twin.copied("state", [source], [destination])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            self.twin.apply(self.pool.take_delta())
            self.twin.verify()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
