"""A step's table writes, and what each group reads, as the device gets them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.engine.device_plan import DevicePlan, Grain, StatePlan, Tables, most_tiles
from isthmus.engine.padding import padding_tiles
from isthmus.engine.step import BlockWrites, Step
from isthmus.memory import Delta, Group, LayerKV, Op, Writes, kv_spec, state_spec

GROUPS = (
    Group("full", kv_spec([LayerKV(0, 1, 8, 8)], 4), "append"),
    Group("window", kv_spec([LayerKV(1, 1, 8, 8)], 4), "window", 6),
)
GRAIN = Grain(tile=16, programs=8, tile_programs=4)
TABLES = Tables.of(GROUPS, {"tokens": 30}, 3, 40)  # 3 rows of 10 columns, then 31 entries per group


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan(counts: list[int], past: list[int], ops: list[Op], blocks: BlockWrites, grain: Grain = GRAIN) -> DevicePlan:
    start = np.cumsum([0, *counts]).astype(np.int32)
    step = Step(
        Delta(ops),
        blocks,
        np.zeros(start[-1], np.int32),
        start,
        ints(*past),
        np.arange(len(counts), dtype=np.int32),
        (),
    )
    return DevicePlan.of(step, GROUPS, TABLES, dict.fromkeys(("full", "window"), grain))


def test_the_last_write_of_an_entry_is_the_one_that_counts() -> None:
    ops: list[Op] = [
        Writes("full", ints(1, 2), ints(11, 12)),
        Writes("window", ints(1), ints(13)),
        Writes("full", ints(2, 3), ints(14, 15)),
        Writes("window", ints(1), ints(0)),
    ]
    blocks = BlockWrites(ints(0, 2, 0), ints(1, 9, 1), ints(5, 6, 7))
    for _ in range(2):  # nothing is left of it in the next step
        made = plan([1], [3], ops, blocks)
        assert made.index.dtype == made.value.dtype == np.int32
        written = dict(zip(made.index.tolist(), made.value.tolist(), strict=True))
        assert len(written) == len(made.index), "an entry twice"
        assert written == {1: 7, 29: 6, 31: 11, 32: 14, 33: 15, 62: 0}
        assert plan([1], [3], ops[:1], BlockWrites(ints(), ints(), ints())).index.tolist() == [31, 32]
    assert len(plan([1], [3], [], BlockWrites(ints(), ints(), ints())).index) == 0


def test_decodes_read_their_own_row_and_chunks_do_not() -> None:
    nothing = BlockWrites(ints(), ints(), ints())
    alone = plan([1, 1], [3, 12], [], nothing)
    assert alone.decode
    assert alone.positions.tolist() == [3, 12]
    assert [alone.groups[name].first.tolist() for name in ("full", "window")] == [[0, 0], [0, 7 // 4]]
    assert alone.end.tolist() == [1, 4]
    assert all(group.tiles is None for group in alone.groups.values())

    mixed = plan([1, 5], [12, 8], [], nothing)
    assert not mixed.decode
    assert mixed.positions.tolist() == [12, 8, 9, 10, 11, 12]
    assert mixed.sequence_of.tolist() == [0, 1, 1, 1, 1, 1]
    assert mixed.end.tolist() == [4, 2]
    assert mixed.groups["window"].first.tolist() == [7 // 4, 3 // 4]
    decodes, tiles = mixed.groups["window"].decodes, mixed.groups["window"].tiles
    assert tiles is not None
    assert decodes.items[:, :4].tolist() == [[0, 0, 7, 13]]
    assert tiles.tiles.tolist() == [[1, 1, 6, 1, 8, 0, 0, 0]]

    chunks = plan([2, 5], [12, 0], [], nothing)
    assert not any(len(group.decodes.items) for group in chunks.groups.values())


def test_groups_that_read_the_same_have_one_plan() -> None:
    """As long as nobody is longer than the window."""
    nothing = BlockWrites(ints(), ints(), ints())
    inside, beyond, mixed = (
        plan(*lengths, [], nothing) for lengths in (([1, 1], [5, 2]), ([1, 1], [6, 2]), ([1, 3], [5, 9]))
    )
    for made, one in ((inside, True), (beyond, False), (mixed, True)):
        full, window = (made.groups[name].decodes for name in ("full", "window"))
        assert (full is window) == one
    other = {"full": GRAIN, "window": Grain(16, 3, 4)}
    step = Step(Delta(), nothing, ints(0, 0), ints(0, 1, 2), ints(5, 2), ints(0, 1), ())
    made = DevicePlan.of(step, GROUPS, TABLES, other)
    assert [len(made.groups[name].decodes.bounds) for name in ("full", "window")] == [9, 4], "for as many programs"


def test_tiles_are_cut_by_what_their_group_sees() -> None:
    """Behind 5,000 tokens: all of them, the last 4,095, or what comes from token 4,096 on."""
    spec = kv_spec([LayerKV(0, 1, 8, 8)], 4)
    groups = [Group("full", spec, "append"), *(Group(name, spec, "window", 4096) for name in ("window", "chunk"))]
    none, grain = ints(), Grain(16, 8, 8)
    step = Step(Delta(), BlockWrites(none, none, none), ints(*[0] * 20), ints(0, 20), ints(5000), ints(0), ())
    tables = Tables.of(groups, {"tokens": 30}, 1, 40)
    made = DevicePlan.of(step, groups, tables, dict.fromkeys(("full", "window", "chunk"), grain), ["chunk"])
    seen = {name: group.tiles for name, group in made.groups.items()}
    widths = {name: int(tiles.tiles[0, 5]) for name, tiles in seen.items() if tiles is not None}
    assert all(tiles is not None and tiles.slots == len(tiles.tiles) == 8 for tiles in seen.values())
    assert widths == {"full": 1280, "window": 1088, "chunk": 256}


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 9000)), min_size=1, max_size=40),
    st.integers(0, 300),
    st.integers(1, 70),
    st.integers(1, 132),
)
def test_no_more_tiles_than_a_graph_has_places_for(
    sequences: list[tuple[int, int]], more: int, tile: int, programs: int
) -> None:
    """Whatever the chunks' lengths, cut or not, and however many tokens are padding."""
    counts, past = (list(x) for x in zip(*sequences, strict=True))
    grain = Grain(tile, 8, programs)
    made = plan(counts, past, [], BlockWrites(ints(), ints(), ints()), grain)
    size = sum(counts) + more
    for group in made.groups.values():
        tiles = () if group.tiles is None else group.tiles.tiles
        rows = len(tiles) + len(padding_tiles(sum(counts), size, tile))
        assert rows <= most_tiles(size, min(size, len(counts)), grain)


def test_states_are_entries_of_their_own_table_and_padding_has_the_null_page() -> None:
    """Ids of states are not ids of tokens: their table is as long as their space."""
    state = Group("state", state_spec([("0.x", (4,), "float32")]), "state")
    tables = Tables.of((*GROUPS, state), {"tokens": 30, "states": 3}, 3, 40)
    assert tables.at["state"] == 30 + 2 * 31
    assert tables.size == tables.at["state"] + 4
    nothing = BlockWrites(ints(), ints(), ints())
    step = Step(Delta(), nothing, ints(*[0] * 6), ints(0, 1, 6), ints(12, 0), ints(0, 1), (), ints(3, 1))
    made = StatePlan.of(step, state, tables).padded(1, 2)
    null = tables.at["state"]
    assert made.entry.tolist() == [null + 3, null + 1, null]
    assert made.fresh.tolist() == [False, True, True]
    assert made.query_start.tolist() == [0, 1, 6, 8]
    assert (made.decodes.tolist(), made.chunks.tolist()) == ([0], [1, 2])
