"""Long sequences and chunks that several programs have in parts, which are merged: against dense attention.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.attention_world import (
    FP8,
    SHAPES,
    Shape,
    close,
    cut,
    decode,
    dense,
    name_of,
    plan,
    poisoned,
    prefill,
    scoring,
    tiles_of,
    world,
)

from isthmus.kernels.attention import (
    DecodeConfig,
    DecodeItems,
    PrefillConfig,
    Workspace,
    prefill_attention,
)


@pytest.mark.parametrize("length", [130, 64 * 16, 64 * 16 + 1, 64 * 35])
def test_parts_of_a_sequence_are_merged(device: str, length: int) -> None:
    """One level of merging up to 16 parts, two beyond."""
    at = world(device, Shape(2, 2, 16, 16, 64), [1, 1], [length - 1, 70])
    at.write()
    slots = len(plan(at, 64).items) - 5
    assert slots >= length // 64
    close(decode(at, scoring(at), 64, config=DecodeConfig(64, 4, 2)), dense(at, scoring(at)), torch.float32)


def test_a_workspace_serves_launch_after_launch(device: str) -> None:
    """Layers of different shapes share one; what a launch leaves in it must not matter to the next."""
    wide = world(device, Shape(2, 2, 16, 32, 16), [1, 1], [400, 150])
    narrow = world(device, Shape(1, 4, 16, 16, 16), [1], [500])
    workspace = Workspace.of(64, 4, 32, device)
    workspace.rows.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    for at in (wide, narrow, wide):
        at.write()
        close(decode(at, scoring(at), 16, workspace=workspace), dense(at, scoring(at)), torch.float32)


@pytest.mark.parametrize("programs", [1, 7, 200])
def test_the_answer_does_not_depend_on_who_computes_it(device: str, programs: int) -> None:
    """Parts are merged in the order of their slots, bit for bit, however many programs have them."""
    at = world(device, Shape(), [1, 1, 1], [300, 1100, 64])
    at.write()
    config = DecodeConfig(64, 4, 2)
    items = plan(at, 20)
    wanted = decode(at, scoring(at), config=config, items=items)
    bounds = np.linspace(0, int(items.bounds[-1]), programs + 1).round().astype(np.int32)
    others = DecodeItems(items.items, torch.from_numpy(bounds).to(device))
    assert torch.equal(decode(at, scoring(at), config=config, items=others), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_chunk_in_parts_sees_cached_rows_then_its_own(device: str, shape: Shape) -> None:
    """Several parts of cached rows; a part that begins among them and ends among the chunk's own."""
    at = world(device, shape, [19, 3, 42], [150, 64, 40])
    close(prefill(at, scoring(at), tiles=cut(at)), dense(at, scoring(at)), shape.dtype)


@pytest.mark.parametrize("window", [10, 20, 100, 300])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_chunk_in_parts_sees_its_window_only(device: str, window: int, page_size: int) -> None:
    """Of a part that ends where a query's window begins it sees nothing."""
    at = world(device, Shape(2, 3, 16, 32, page_size, window=window), [50, 2, 90], [130, 191, 30])
    how, config = scoring(at, softcap=2.0, sinks=True), PrefillConfig(128, 32, 4, 2)
    close(prefill(at, how, config, tiles=cut(at, config)), dense(at, how), torch.float32)


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True), (0.5, True)])
def test_a_chunk_in_parts_has_soft_cap_and_sinks(device: str, softcap: float | None, sinks: bool) -> None:
    """A sink counts once, however many parts there are."""
    at = world(device, Shape(), [9, 12], [260, 70])
    how = scoring(at, softcap=softcap, sinks=sinks)
    close(prefill(at, how, tiles=cut(at)), dense(at, how), torch.float32)


def test_a_step_is_cut_where_programs_have_no_work(device: str) -> None:
    """As a step is planned: a short chunk behind many tokens, a middling one, a whole prompt, and decodes beside."""
    at = world(device, Shape(1, 4), [10, 1, 20, 30, 1], [700, 40, 150, 0, 3])
    tiles = tiles_of(at, programs=8)
    assert 0 < tiles.slots < len(tiles.tiles)
    out, wanted = prefill(at, scoring(at), tiles=tiles), dense(at, scoring(at))
    chunks = torch.from_numpy(np.repeat(at.counts > 1, at.counts)).to(device)
    close(out[chunks], wanted[chunks], torch.float32)
    assert (out[~chunks] == 77).all()
    assert torch.equal(prefill(at, scoring(at), tiles=tiles), out), "not the same bits again"
    whole = torch.from_numpy(np.repeat(at.counts == 30, at.counts)).to(device)
    assert torch.equal(prefill(at, scoring(at))[whole], out[whole]), "what is not cut must be as it was"


def test_rows_of_a_plan_that_nobody_has_are_no_work(device: str) -> None:
    """A graph has room for more tiles, and merges as many slots as there can ever be."""
    at = world(device, Shape(), [5, 20], [200, 10])
    tiles = cut(at)
    rows = torch.zeros(40, 8, dtype=torch.int32, device=device)
    rows[: len(tiles.tiles)] = tiles.tiles
    roomy = replace(tiles, tiles=rows, slots=30)
    close(prefill(at, scoring(at), tiles=roomy), dense(at, scoring(at)), torch.float32)
    roomy.tiles.zero_()
    assert (prefill(at, scoring(at), tiles=roomy) == 77).all()


def test_decodes_and_chunks_share_a_workspace(device: str) -> None:
    """Layer after layer, decodes first; neither is disturbed by what the others left."""
    at = world(device, Shape(2, 2, 16, 16, 16), [1, 9], [500, 150])
    at.write()
    tiles, wanted = cut(at), dense(at, scoring(at))
    workspace = poisoned(at, tiles)
    for _ in range(2):
        close(decode(at, scoring(at), 16, workspace=workspace)[:1], wanted[:1], torch.float32)
        close(prefill(at, scoring(at), tiles=tiles, workspace=workspace)[1:], wanted[1:], torch.float32)


def test_parts_of_fp8_pages_have_their_scales(device: str) -> None:
    at = world(device, FP8, [9, 20], [150, 64])
    how, scales = scoring(at), (0.5, 3.0)
    wanted = dense(at, how, *scales)
    at.keys = [x * 0.5 for x in at.keys]
    at.values = [x * 3.0 for x in at.values]
    close(prefill(at, how, scales=scales, tiles=cut(at)), wanted, torch.bfloat16)


@pytest.mark.gpu
def test_one_captured_graph_serves_chunks_of_any_lengths() -> None:
    """In parts and whole, in the same places."""
    long = world("cuda", Shape(2, 2, 64, 64, 16, torch.bfloat16), [60, 4], [3000, 1500])
    short = replace(long, past=np.array([20, 70]))
    short = replace(short, keys=[x[:80] for x in long.keys], values=[x[:80] for x in long.values])
    short.keys[1], short.values[1] = (x[1][:74] for x in (long.keys, long.values))
    how, table, out = scoring(long), long.page_table, long.blank()
    first = tiles_of(long, programs=66)
    live = replace(first, tiles=torch.zeros(200, 8, dtype=torch.int32).cuda(), slots=132)
    workspace = poisoned(long, live)
    key, value = (torch.empty_like(long.own(x)) for x in (long.keys, long.values))

    def launch() -> None:
        prefill_attention(long.query, out, key, value, *long.pages, table, live, workspace, how)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    slots = []
    for at in (long, short, long):
        planned = tiles_of(at, programs=66)
        slots.append(planned.slots)
        live.tiles.zero_()
        live.tiles[: len(planned.tiles)] = planned.tiles
        key.copy_(at.own(at.keys))
        value.copy_(at.own(at.values))
        out.fill_(77)
        graph.replay()
        close(out, dense(at, how), torch.bfloat16)
    assert slots[0] > 0
    assert slots[1] == 0
