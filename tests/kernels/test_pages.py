"""Page and table kernels against NumPy: under Triton's interpreter without a GPU, compiled with one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from isthmus.kernels import pages
from isthmus.kernels.pages import COPY_BYTES, ENTRIES, NOWHERE, copy_pages, fill_pages, scatter, translate

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels run instead")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

PAGE_BYTES = [16, 4_096 + 16, COPY_BYTES, 2 * COPY_BYTES + 1_040]


def int32(values: Any, device: str) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


def noise(rng: np.random.Generator, nbytes: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("device", DEVICES)
class TestCopyPages:
    @pytest.mark.parametrize("page_bytes", PAGE_BYTES)
    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_copies_whole_pages_and_nothing_else(self, device: str, page_bytes: int, n: int) -> None:
        rng = np.random.default_rng(n)
        pages = 2 * n + 3
        before = noise(rng, pages * page_bytes + 48)  # the arena's tail belongs to no page of this group
        order = rng.permutation(pages)
        source, destination = order[:n], order[n : 2 * n]
        arena = torch.from_numpy(before.copy()).to(device)
        copy_pages(arena, page_bytes, int32(source, device), int32(destination, device))
        expected = before.copy()
        rows = expected[: pages * page_bytes].reshape(pages, page_bytes)
        rows[destination] = rows[source]
        np.testing.assert_array_equal(arena.cpu().numpy(), expected)

    def test_takes_indices_that_start_anywhere(self, device: str) -> None:
        before = noise(np.random.default_rng(0), 8 * 32)
        arena = torch.from_numpy(before.copy()).to(device)
        source, destination = int32([9, 1, 2], device)[1:], int32([9, 6, 5], device)[1:]
        copy_pages(arena, 32, source, destination)
        expected = before.copy().reshape(8, 32)
        expected[[6, 5]] = expected[[1, 2]]
        np.testing.assert_array_equal(arena.cpu().numpy(), expected.ravel())

    def test_refuses_a_page_that_vectors_cannot_cover(self, device: str) -> None:
        arena = torch.zeros(96, dtype=torch.uint8, device=device)
        with pytest.raises(AssertionError, match="24 bytes is no multiple of 16"):
            copy_pages(arena, 24, int32([1], device), int32([2], device))
        with pytest.raises(AssertionError, match="start on 16 bytes"):
            copy_pages(arena[8:], 16, int32([1], device), int32([2], device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
@pytest.mark.parametrize("value", [0, 0x7F, 0xFF])
def test_fill_pages_sets_every_byte_of_those_pages(device: str, page_bytes: int, value: int) -> None:
    before = noise(np.random.default_rng(1), 6 * page_bytes)
    arena = torch.from_numpy(before.copy()).to(device)
    fill_pages(arena, page_bytes, int32([4, 1], device), value)
    expected = before.copy().reshape(6, page_bytes)
    expected[[4, 1]] = value
    np.testing.assert_array_equal(arena.cpu().numpy(), expected.ravel())
    fill_pages(arena, page_bytes, int32([], device), 3)
    np.testing.assert_array_equal(arena.cpu().numpy(), expected.ravel())


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_words_are_reached() -> None:
    page_bytes = 1 << 20
    arena = torch.zeros(9 << 30, dtype=torch.uint8, device="cuda")
    last = len(arena) // page_bytes - 1
    fill_pages(arena, page_bytes, int32([last], "cuda"), 0x5A)
    copy_pages(arena, page_bytes, int32([last], "cuda"), int32([last - 2], "cuda"))
    sums = arena.view(-1, page_bytes).sum(1, dtype=torch.int64).cpu()
    assert sums.nonzero().ravel().tolist() == [last - 2, last]
    assert sums[last] == sums[last - 2] == 0x5A * page_bytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, ENTRIES, ENTRIES + 3])
def test_scatter_writes_the_first_n(device: str, n: int) -> None:
    rng = np.random.default_rng(n)
    before = rng.integers(0, 99, 700, np.int32)
    index, value = rng.permutation(700)[: n + 4].astype(np.int32), rng.integers(100, 999, n + 4, np.int32)
    buffer = int32(before, device)
    scatter(buffer, int32(index, device), int32(value, device), n)
    expected = before.copy()
    expected[index[:n]] = value[:n]
    np.testing.assert_array_equal(buffer.cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_scatter_writes_nothing_where_no_place_is_named(device: str) -> None:
    """Places of a graph that a step leaves over; those between others too."""
    index = np.full(ENTRIES + 9, NOWHERE, np.int32)
    index[[0, 3, ENTRIES + 1]] = 5, 0, 2
    whole = int32([7] * 7, device)
    scatter(whole[1:], int32(index, device), int32(np.arange(len(index)) + 20, device), len(index))
    assert whole.tolist() == [7, 23, 7, 20 + ENTRIES + 1, 7, 7, 20]


@dataclasses.dataclass
class Case:
    """A step over random tables, and what translating it must give."""

    table: NDArray[np.int32]
    blocks: NDArray[np.int32]
    rows: NDArray[np.int32]
    first: NDArray[np.int32]
    end: NDArray[np.int32]
    sequence_of: NDArray[np.int32]
    position: NDArray[np.int32]
    page_size: int

    def run(
        self, device: str, position_dtype: torch.dtype = torch.int32, columns: int | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """`(page_table, slots)`; entries nobody wrote are -7. columns: None: as many as there are at most."""
        tables = int32(np.concatenate([[-9] * 3, self.table, self.blocks.ravel()]), device)
        wide = torch.full((len(self.rows) + 1, self.blocks.shape[1] + 6), -7, dtype=torch.int32, device=device)
        page_table = wide[:, : self.blocks.shape[1]]  # rows need not be contiguous
        slots = torch.full((len(self.position),), -7, dtype=torch.int64, device=device)
        rows, first, end, sequence_of, position = (
            int32(x, device) for x in (self.rows, self.first, self.end, self.sequence_of, self.position)
        )
        translate(
            tables,
            rows,
            first,
            end,
            sequence_of,
            position.to(position_dtype),
            page_table,
            slots,
            table_at=3,
            table_size=len(self.table),
            blocks_at=3 + len(self.table),
            block_columns=self.blocks.shape[1],
            page_size=self.page_size,
            columns=max(0, int((self.end - self.first).max(initial=0))) if columns is None else columns,
        )
        assert (wide[:, self.blocks.shape[1] :] == -7).all()
        return page_table.cpu().numpy(), slots.cpu().numpy()

    def expected(self) -> tuple[NDArray[Any], NDArray[Any]]:
        page_table = np.full((len(self.rows) + 1, self.blocks.shape[1]), -7, np.int32)
        for s, row in enumerate(self.rows):
            for c in range(self.first[s], self.end[s]):
                page_table[s, c] = self.table[self.blocks[row, c]]
        slots = np.full(len(self.position), -1, np.int64)
        for t, (s, p) in enumerate(zip(self.sequence_of, self.position, strict=True)):
            page = self.table[self.blocks[self.rows[s], p // self.page_size]] if s >= 0 else 0
            if page:
                slots[t] = int(page) * self.page_size + p % self.page_size
        return page_table, slots


def case(page_size: int, counts: list[int], pasts: list[int], columns: int, window: int | None = None) -> Case:
    """Sequence s has `counts[s]` tokens after `pasts[s]`; columns before the window are unbound and not wanted."""
    rng = np.random.default_rng(page_size)
    ids = 3 * columns * len(counts) + 1
    table = rng.permutation(ids).astype(np.int32) + 1
    table[0] = 0
    blocks = rng.integers(0, 1 << 30, (len(counts) + 2, columns), np.int32)  # garbage past a sequence's end
    rows = rng.permutation(len(blocks))[: len(counts)].astype(np.int32)
    ends = np.add(counts, pasts)
    end = (-(-ends // page_size)).astype(np.int32)
    first = np.zeros_like(end) if window is None else (np.maximum(ends - window, 0) // page_size).astype(np.int32)
    names = rng.permutation(np.arange(1, ids)).astype(np.int32)
    for s, row in enumerate(rows):
        blocks[row, : end[s]], names = names[: end[s]], names[end[s] :]
        table[blocks[row, : first[s]]] = 0
    sequence_of = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    position = np.concatenate([np.arange(p, e) for p, e in zip(pasts, ends, strict=True)]).astype(np.int32)
    return Case(table, blocks, rows, first, end, sequence_of, position, page_size)


def assert_translates(
    step: Case, device: str, position_dtype: torch.dtype = torch.int32, columns: int | None = None
) -> None:
    for got, wanted in zip(step.run(device, position_dtype, columns), step.expected(), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
class TestTranslate:
    @pytest.mark.parametrize("page_size", [1, 3, 16])
    def test_decodes_and_chunks_of_unequal_lengths(self, device: str, page_size: int) -> None:
        columns = 2 * ENTRIES + 9
        longest = columns * page_size - 1
        assert_translates(case(page_size, [1, 1, 300, 2], [0, longest, 17, ENTRIES], columns), device)

    @pytest.mark.parametrize("programs", [1, 8, 12])
    def test_few_programs_take_all_columns(self, device: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a graph: programs for the longest sequences there may be, and no more than run at once."""
        monkeypatch.setattr(pages, "_TABLE_PROGRAMS", programs)
        columns = 6 * ENTRIES + 9
        step = case(2, [1, 2, 1, 1], [0, 2 * columns - 2, 2 * 3 * ENTRIES, 40], columns)
        step.first[1], step.first[2] = ENTRIES + 3, 3 * ENTRIES
        assert_translates(step, device, columns=columns)

    def test_a_window_wants_its_tail_and_writes_only_what_is_bound(self, device: str) -> None:
        step = case(4, [1, 40, 1], [100, 3, 2], 32, window=10)
        assert (step.expected()[1] == -1).any()
        assert_translates(step, device)

    def test_padding_tokens_and_lanes_are_left_out(self, device: str) -> None:
        step = case(4, [1, 1, 1, 1], [9, 30, 5, 7], 16)
        step.sequence_of[2:] = -1
        step.position[2:] = 1 << 29  # whatever a stale lane holds
        step.first[3], step.end[3] = 8, 2
        step.rows[3] = 1 << 29
        assert_translates(step, device)

    def test_positions_may_be_int64(self, device: str) -> None:
        assert_translates(case(16, [5, 1], [30, 200], 20), device, torch.int64)

    def test_either_half_may_be_empty(self, device: str) -> None:
        step = case(4, [3, 2], [9, 30], 16)
        no_columns = dataclasses.replace(step, end=step.first)
        assert (no_columns.run(device)[0] == -7).all()
        assert_translates(no_columns, device)
        none = np.zeros(0, np.int32)
        assert_translates(dataclasses.replace(step, sequence_of=none, position=none), device)
        assert_translates(Case(step.table, step.blocks, none, none, none, none, none, 4), device)


class TestDebugChecks:
    """What `TRITON_DEBUG=1` adds. The interpreter has the same switch, in its options."""

    @pytest.fixture
    def interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if torch.cuda.is_available():
            pytest.skip("a trap ends the process on a GPU: see the test in a process of its own")
        debug = dataclasses.replace(interpreter_builder.options, debug=True)
        monkeypatch.setattr(interpreter_builder, "options", debug)

    @pytest.mark.usefixtures("interpreter")
    @pytest.mark.parametrize("index", [-2, 10])
    def test_scatter_outside_the_buffer(self, index: int) -> None:
        buffer = torch.zeros(12, dtype=torch.int32)[1:11]
        with pytest.raises(Exception, match="scatter: index outside the buffer"):
            scatter(buffer, int32([3, index], "cpu"), int32([1, 1], "cpu"), 2)
        scatter(buffer, int32([3, index], "cpu"), int32([1, 1], "cpu"), 1)

    @pytest.mark.usefixtures("interpreter")
    def test_translate_outside_a_table(self) -> None:
        good = case(4, [1, 1], [9, 30], 8)
        assert_translates(good, "cpu")
        # The founding bug: a page table shorter than the ids that index it.
        largest = int(good.blocks[good.rows[1], : good.end[1]].max())
        with pytest.raises(Exception, match="id outside the page table"):
            dataclasses.replace(good, table=good.table[:largest]).run("cpu")
        with pytest.raises(Exception, match="row outside the block table"):
            dataclasses.replace(good, rows=np.array([0, 4], np.int32)).run("cpu")
        with pytest.raises(Exception, match="column outside it"):
            dataclasses.replace(good, position=np.array([9, 32], np.int32)).run("cpu")

    @pytest.mark.gpu
    def test_a_trap_on_the_device_names_the_fault(self) -> None:
        body = (
            "import torch; from isthmus.kernels.pages import scatter\n"
            "x = torch.arange(4, dtype=torch.int32, device='cuda')\n"
            "scatter(x, x + 1, x, 4); torch.cuda.synchronize()"
        )
        environment = {**os.environ, "TRITON_DEBUG": "1"}
        done = subprocess.run(
            [sys.executable, "-c", body], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "scatter: index outside the buffer" in done.stdout + done.stderr


@pytest.mark.gpu
def test_no_step_compiles_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one call of each, other counts, alignments, strides and page sizes in bytes meet compiled kernels."""

    def everything(n: int, skip: int, page_bytes: int) -> None:
        arena = torch.zeros(64 * page_bytes, dtype=torch.uint8, device="cuda")
        pages = torch.arange(2 * n + skip, dtype=torch.int32, device="cuda")[skip:]
        copy_pages(arena, page_bytes, pages[:n], pages[n:])
        fill_pages(arena, page_bytes, pages[:n], n)
        scatter(torch.zeros(64, dtype=torch.int32, device="cuda")[skip:], pages, pages, n)
        assert_translates(case(16, [1] * n, list(range(n)), 8 + skip), "cuda")

    everything(2, 0, 64)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kwargs: compiled.append(kwargs["repr"]))
    for n, skip, page_bytes in ((1, 0, 16), (1, 1, 48), (16, 3, 4_096), (17, 0, 8_208)):
        everything(n, skip, page_bytes)
    assert compiled == []
