"""The paged kernel against dense attention in double precision, over an arena full of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.kernels.reference import GroupBatch, LayerCache, PartView, Scoring, Scratch, attend, group_batch
from isthmus.memory import Group, LayerKV, kv_spec

HEADS, KV_HEADS, K_DIM, V_DIM = 6, 2, 8, 12
LAYER = 3  # of a group whose other layer must stay untouched


@dataclass
class World:
    """Some sequences, their rows in full, and pages for what a step may need of them."""

    group: Group
    counts: np.ndarray  # new tokens of each sequence
    past: np.ndarray
    dtype: torch.dtype
    arena: Tensor
    pages: np.ndarray  # [sequences, columns], 0 = no page
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def query_start(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.counts)))

    @property
    def cache(self) -> LayerCache:
        return LayerCache(*(PartView.of(self.arena, self.group, f"{LAYER}.{x}") for x in "kv"))

    def batch(self) -> GroupBatch:
        return group_batch(self.group, self.query_start, self.past, lambda s, c: self.pages[s, c])

    def own(self, rows: list[Tensor]) -> Tensor:
        """The step's own rows, flat."""
        return torch.cat([x[p:] for x, p in zip(rows, self.past.tolist(), strict=True)])


def world(
    counts: list[int], past: list[int], *, page_size: int, window: int | None = None, dtype: torch.dtype = torch.float32
) -> World:
    """Random rows; cached tokens that can still be seen lie in pages in random order, everything else is NaN."""
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    name = str(dtype).removeprefix("torch.")
    spec = kv_spec([LayerKV(0, 1, 4, 4, name), LayerKV(LAYER, KV_HEADS, K_DIM, V_DIM, name)], page_size)
    group = Group("g", spec, "append" if window is None else "window", window)
    lengths = [n + p for n, p in zip(counts, past, strict=True)]
    columns = max(-(-n // page_size) for n in lengths)
    free = draw.permutation(np.arange(1, len(counts) * columns + 1))
    pages = free.reshape(len(counts), columns).astype(np.int64)
    arena = torch.full(((len(free) + 1) * spec.page_bytes + 8,), 0xFF, dtype=torch.uint8)
    keys = [torch.randn(n, KV_HEADS, K_DIM).to(dtype) for n in lengths]
    values = [torch.randn(n, KV_HEADS, V_DIM).to(dtype) for n in lengths]
    new = World(group, np.array(counts), np.array(past), dtype, arena, pages, keys, values)
    for s, (n, p) in enumerate(zip(counts, past, strict=True)):
        first = 0 if window is None else max(0, p - window + 1)
        # What only this chunk's own queries see, or nobody any more, has no page; the last token always has one.
        seen_later = 0 if window is None else min(p + n - 1, max(0, p + n - window + 1))
        for column in range(columns):
            low, high = column * page_size, (column + 1) * page_size
            if high <= first or (low >= p and high <= seen_later) or low >= p + n:
                pages[s, column] = 0
        position = torch.arange(first, p)
        where = torch.from_numpy(pages[s])[position // page_size], position % page_size
        new.cache.key.write(*where, keys[s][first:p])
        assert new.cache.value is not None
        new.cache.value.write(*where, values[s][first:p])
    return new


def dense(query: Tensor, key: Tensor, value: Tensor, past: int, window: int | None, how: Scoring) -> Tensor:
    """Attention of the last `len(query)` tokens over all rows of one sequence, in double precision."""
    query, key, value = (x.double() for x in (query, key, value))
    group = HEADS // KV_HEADS
    out = torch.empty(len(query), HEADS, V_DIM, dtype=torch.double)
    for i in range(len(query)):
        for h in range(HEADS):
            scores = key[:, h // group] @ query[i, h] * how.scaling
            if how.softcap is not None:
                scores = torch.tanh(scores / how.softcap) * how.softcap
            position = torch.arange(len(key))
            seen = position <= past + i
            if window is not None:
                seen &= position > past + i - window
            weights = scores[seen].exp()
            total = weights.sum() + (0 if how.sinks is None else how.sinks[h].double().exp())
            out[i, h] = weights @ value[seen, h // group] / total
    return out


def check(w: World, how: Scoring, *, write: bool = True, scratch: Scratch | None = None) -> None:
    query = torch.randn(int(w.counts.sum()), HEADS, K_DIM).to(w.dtype)
    out = attend(query, w.own(w.keys), w.own(w.values), w.cache, w.batch(), how, scratch or Scratch(), write=write)
    for s, start in enumerate(w.query_start[:-1]):
        mine = slice(int(start), int(start + w.counts[s]))
        expected = dense(query[mine], w.keys[s], w.values[s], int(w.past[s]), w.group.window, how)
        tolerance = 1e-5 if w.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(out[mine].double(), expected, rtol=tolerance, atol=tolerance)


PLAIN = Scoring(0.3)
COUNTS = [1, 5, 1, 33, 1, 1, 300]
PAST = [0, 0, 40, 17, 7, 3, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 16, 100])
def test_a_mixed_step_equals_dense_attention(page_size: int, window: int | None, dtype: torch.dtype) -> None:
    """Decodes and chunks, from nothing and from the cache; NaN in every byte that is nobody's."""
    check(world(COUNTS, PAST, page_size=page_size, window=window, dtype=dtype), PLAIN)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    "how", [Scoring(1.0, softcap=1.5), Scoring(0.3, sinks=torch.linspace(-2, 3, HEADS)), Scoring(0.05)]
)
def test_scores_are_scaled_capped_and_sunk(how: Scoring, window: int | None) -> None:
    check(world(COUNTS, PAST, page_size=4, window=window), how)


def test_a_chunk_at_any_place_sees_its_window_exactly() -> None:
    """Every alignment of chunk start, page and window."""
    for past in range(24):
        check(world([3, 1], [past, past], page_size=4, window=6), PLAIN)


def test_blocks_of_queries_do_not_show() -> None:
    """A chunk of several query blocks over a long past, with a window that ends inside them and none."""
    for window in (None, 40, 150, 1000):
        check(world([400], [90], page_size=16, window=window), PLAIN)


def test_padding_one_long_sequence_with_many_short_ones_is_avoided() -> None:
    w = world([1] * 9, [4000, *range(8)], page_size=16)
    buckets = w.batch().buckets
    assert [len(b.tokens) for b in buckets] == [1, 8]
    assert sum(len(b.pages) for b in buckets) == 251 + 8
    check(w, PLAIN)


def test_a_window_group_reads_only_its_window() -> None:
    """1,000 tokens cached, 20 visible: two pages of 16, not 63."""
    w = world([1], [1000], page_size=16, window=20)
    (bucket,) = w.batch().buckets
    assert len(bucket.pages) == 2


def test_a_shared_layer_reads_what_its_owner_wrote() -> None:
    """`write=False` leaves the pages alone, also when the rows differ."""
    w = world([1, 3], [9, 8], page_size=4)
    check(w, PLAIN)
    before = w.arena.clone()
    check(w, PLAIN, write=False)
    assert torch.equal(w.arena, before)


def test_writes_touch_their_own_slots_only() -> None:
    """Every changed byte of the arena belongs to a token of the step, in the layer that wrote."""
    w = world([1, 6], [9, 8], page_size=4, window=5)
    before = w.arena.clone()
    check(w, PLAIN)
    expected = before.clone()
    cache = LayerCache(*(PartView.of(expected, w.group, f"{LAYER}.{x}") for x in "kv"))
    for s, (n, p) in enumerate(zip(w.counts.tolist(), w.past.tolist(), strict=True)):
        for t in range(p, p + n):
            page = int(w.pages[s, t // 4])
            if page:
                place = torch.tensor([page]), torch.tensor([t % 4])
                cache.key.write(*place, w.keys[s][t : t + 1])
                assert cache.value is not None
                cache.value.write(*place, w.values[s][t : t + 1])
    assert torch.equal(w.arena, expected)
    assert not torch.equal(w.arena, before)


def test_reading_a_token_without_a_page_raises() -> None:
    for counts in ([1], [4]):
        w = world(counts, [9], page_size=4)
        w.pages[0, 1] = 0
        with pytest.raises(IndexError, match=r"group 'g': the step reads a token that has no page"):
            w.batch()


def test_a_buffer_too_small_grows_and_one_too_large_is_reused() -> None:
    scratch = Scratch()
    for counts, past in (([1], [3]), ([1, 9], [200, 90]), ([1], [5])):
        check(world(counts, past, page_size=4), PLAIN, scratch=scratch)


def test_rows_that_fill_no_wide_word_are_copied_too() -> None:
    """One head of three bf16 numbers: six bytes a row."""
    spec = kv_spec([LayerKV(0, 1, 3, 3, "bfloat16")], 4)
    view = PartView.of(torch.zeros(spec.page_bytes * 3, dtype=torch.uint8), Group("g", spec, "append"), "0.v")
    rows = torch.randn(2, 1, 3).bfloat16()
    view.write(torch.tensor([2, 1]), torch.tensor([3, 0]), rows)
    assert torch.equal(view.read(torch.tensor([1, 2]), Scratch().key)[[7, 0]], rows)
