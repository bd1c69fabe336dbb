"""The GPU kernels against dense attention in double precision and against the CPU reference, in an arena of NaN.

Without a GPU they run through Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.attention_world import (
    FP8,
    LAYER,
    SHAPES,
    Shape,
    close,
    decode,
    dense,
    name_of,
    plan,
    prefill,
    scoring,
    world,
)

from isthmus.kernels.attention import (
    DecodeItems,
    PrefillConfig,
    Workspace,
    decode_attention,
    write_kv,
)
from isthmus.kernels.reference import LayerCache, PartView, Scratch, attend, group_batch


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_decode_sees_its_whole_context(device: str, shape: Shape) -> None:
    at = world(device, shape, [1, 1, 1], [0, 37, 150])
    at.write()
    close(decode(at, scoring(at)), dense(at, scoring(at)), shape.dtype)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_decode_sees_its_window_only(device: str, page_size: int) -> None:
    at = world(device, Shape(2, 2, 32, 32, page_size, window=50), [1, 1, 1, 1], [3, 49, 50, 260])
    at.write()
    close(decode(at, scoring(at)), dense(at, scoring(at)), torch.float32)


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True), (0.5, True)])
@pytest.mark.parametrize("target", [1, 64], ids=["whole", "in parts"])
def test_soft_cap_and_sinks(device: str, softcap: float | None, sinks: bool, target: int) -> None:
    at = world(device, Shape(), [1, 1], [20, 200])
    at.write()
    how = scoring(at, softcap=softcap, sinks=sinks)
    close(decode(at, how, target), dense(at, how), torch.float32)


def test_padding_lanes_become_zero_and_others_stay(device: str) -> None:
    at = world(device, Shape(), [1, 5, 1, 2], [40, 0, 90, 0])
    at.write()
    out = decode(at, scoring(at), padding=2)
    wanted = dense(at, scoring(at))
    for token in (0, 6):
        close(out[token], wanted[token], torch.float32)
    assert (out[1:6] == 77).all(), "a decode launch wrote tokens that are not its own"
    assert not out[7:].any(), "padding lanes must hold numbers: later layers compute with them"


def test_no_items_is_no_work(device: str) -> None:
    at = world(device, Shape(), [2], [40])
    assert (decode(at, scoring(at)) == 77).all()


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_chunk_sees_cached_rows_then_its_own(device: str, shape: Shape) -> None:
    at = world(device, shape, [19, 40], [45, 0])
    close(prefill(at, scoring(at)), dense(at, scoring(at)), shape.dtype)


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_chunk_sees_its_window_only(device: str, window: int, page_size: int) -> None:
    at = world(device, Shape(2, 3, 16, 32, page_size, window=window), [50, 2, 33], [70, 150, 0])
    how = scoring(at, softcap=2.0, sinks=True)
    close(prefill(at, how, PrefillConfig(32, 16, 4, 2)), dense(at, how), torch.float32)


def test_only_chunks_are_written(device: str) -> None:
    at = world(device, Shape(), [1, 9, 1], [30, 8, 0])
    out = prefill(at, scoring(at))
    close(out[1:10], dense(at, scoring(at))[1:10], torch.float32)
    assert (out[[0, 10]] == 77).all()


@pytest.mark.parametrize("window", [None, 40])
def test_a_mixed_step_equals_the_reference(device: str, window: int | None) -> None:
    at = world(device, Shape(2, 2, 32, 16, 16, window=window), [1, 30, 1, 7], [100, 25, 3, 64])
    how = scoring(at, softcap=3.0, sinks=True)
    arena = at.arena.cpu().clone()
    cache = LayerCache(*(PartView.of(arena, at.group, f"{LAYER}.{x}") for x in "kv"))
    batch = group_batch(at.group, at.query_start, at.past, lambda s, c: at.table[s, c].astype(np.int64))
    own = at.own(at.keys).cpu(), at.own(at.values).cpu()
    on_cpu = replace(how, sinks=how.sinks.cpu() if how.sinks is not None else None)
    wanted = attend(at.query.cpu(), *own, cache, batch, on_cpu, Scratch(), write=True)
    at.write()
    decoded, chunks = decode(at, how, 8).cpu(), prefill(at, how).cpu()
    single = torch.from_numpy(np.repeat(at.counts == 1, at.counts))
    torch.testing.assert_close(torch.where(single[:, None, None], decoded, chunks), wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(at.arena.cpu(), arena), "the step's rows lie elsewhere than the reference puts them"


def test_fp8_pages_are_read_with_their_scales(device: str) -> None:
    at = world(device, FP8, [1, 1], [60, 200])
    how, scales = scoring(at), (0.5, 3.0)
    wanted = dense(at, how, *scales)
    at.keys = [x * 0.5 for x in at.keys]  # the write divides by the scale: pages hold what `dense` was given
    at.values = [x * 3.0 for x in at.values]
    at.write(*scales)
    close(decode(at, how, 8, scales=scales), wanted, torch.bfloat16)


def test_how_a_prompt_is_cut_does_not_change_fp8_rows(device: str) -> None:
    """A chunk's own rows count as their pages will hold them, so it must not matter which rows are its own."""
    whole = world(device, FP8, [48], [0])
    generator = torch.Generator().manual_seed(1)
    whole.keys = [x + torch.randn(x.shape, generator=generator).to(x) / 9 for x in whole.keys]  # between fp8 numbers
    whole.values = [x + torch.randn(x.shape, generator=generator).to(x) / 9 for x in whole.values]
    scales = (0.5, 3.0)
    config = PrefillConfig(32, 16, 4, 2)  # keys 16 at a time both ways, so sums are alike
    wanted = prefill(whole, scoring(whole), config, scales)
    assert wanted.isfinite().all()
    whole.write(*scales)
    late = replace(whole, counts=np.array([16]), past=np.array([32]), query=whole.query[32:])
    torch.testing.assert_close(prefill(late, scoring(late), config, scales), wanted[32:], atol=1e-5, rtol=1e-5)


def test_rows_are_written_to_their_slots_only(device: str) -> None:
    at = world(device, Shape(3, 1, 16, 8, 4), [6, 1], [3, 10])
    slots = at.slots
    slots[2] = -1
    key, value = at.own(at.keys), at.own(at.values)
    before = [pages.clone() for pages in at.pages]
    other = at.arena.clone()
    write_kv(key, value, *at.pages, slots, early=True)
    for pages, old, own in zip(at.pages, before, (key, value), strict=True):
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                old[slot // 4, slot % 4] = own[i]
        torch.testing.assert_close(pages, old, atol=0, rtol=0, equal_nan=True)
    for pages, old in zip(at.pages, before, strict=True):
        pages.copy_(old)
    written = (at.arena != other).nonzero()
    part = at.group.spec.part(f"{LAYER}.k")
    assert (written % at.group.spec.page_bytes >= part.offset).all(), "another layer's rows were touched"


def test_fp8_rows_saturate(device: str) -> None:
    """A row beyond the largest fp8 number becomes that number, never NaN: one NaN would spoil every later token."""
    at = world(device, replace(FP8, kv_heads=1, v_dim=32), [3], [0])
    at.keys[0][:] = torch.tensor([1e4, -1e4, 1.03], device=device).to(torch.bfloat16)[:, None, None]
    at.write()
    key = at.part("k").view(torch.uint8).flatten(0, 1)[at.slots, 0].view(torch.float8_e4m3fn).float()
    assert key.amax(1).tolist() == key.amin(1).tolist() == [448.0, -448.0, 1.0]


def test_an_arena_of_more_elements_than_an_int32_counts(device: str) -> None:
    """Pages far behind the first: offsets that wrap would read and write elsewhere (or crash)."""
    at = world(device, Shape(1, 2, 16, 16, 16, torch.bfloat16), [1, 18], [40, 30])
    page_bytes = at.group.spec.page_bytes
    far = (1 << 32) // page_bytes + 5  # byte 2^32 is element 2^31
    arena = torch.empty((far + len(at.arena) // page_bytes + 1) * page_bytes, dtype=torch.uint8, device=device)
    arena[far * page_bytes :][: len(at.arena)] = at.arena
    at.arena, at.table = arena, np.where(at.table == 0, 0, at.table + far).astype(np.int32)
    at.write()
    wanted = dense(at, scoring(at))
    close(decode(at, scoring(at))[:1], wanted[:1], torch.bfloat16)
    close(prefill(at, scoring(at))[1:], wanted[1:], torch.bfloat16)


@pytest.mark.gpu
def test_one_captured_graph_serves_any_lengths() -> None:
    long = world("cuda", Shape(2, 2, 64, 64, 16, torch.bfloat16), [1] * 4, [700, 30, 1500, 64])
    long.write()
    short = replace(long, past=np.array([5, 30, 0, 1]))
    how, table, out = scoring(long), long.page_table, long.blank()
    workspace = Workspace.of(256, 4, 64, "cuda")
    live = DecodeItems(torch.zeros(256, 8, dtype=torch.int32).cuda(), torch.zeros(65, dtype=torch.int32).cuda())

    def launch() -> None:
        decode_attention(long.query, out, *long.pages, table, live, workspace, how, early=True)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for at in (long, short, long):
        planned = plan(at, 64)
        live.items[: len(planned.items)] = planned.items
        live.bounds.copy_(planned.bounds)
        out.fill_(77)
        graph.replay()
        close(out, dense(at, how), torch.bfloat16)
