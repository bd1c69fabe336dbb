"""What a GPU does with pages and tables between two forwards, as Triton kernels: copy, fill, scatter, translate.

Every function is one launch on the current stream, and none reads the device back. Copies and fills are sized by live
counts that the host knows. Scatter and translate are sized by the tensors they are given, and how much of them means
something is theirs to say, so a CUDA graph holds them for steps of any numbers. Integers are typed and unspecialised,
and so are the small tensors that a step brings, whatever their alignment: a kernel is compiled once per set of element
types and never while serving.

With `TRITON_DEBUG=1` a table index out of range traps; without it ids and pages are the planner's word.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR_BYTES = 16
"""What one thread loads or stores at once; a page is a multiple of it."""

COPY_BYTES = 8192
"""Of a page per program: four vectors in flight per thread, and one page of 1 MiB still spreads over 128 programs."""

ENTRIES = 256
"""Of a table per program."""

NOWHERE = -1
"""As an index of `scatter`: nothing is written."""

_TABLE_PROGRAMS = 1024
"""Of a translation, for the columns of all its sequences: all of them run at once on a large GPU."""

_INT32_END = 1 << 31


@triton.jit(do_not_specialize=["p_source", "p_destination", "page_vectors"])
def _copy_kernel(
    p_arena: tl.tensor, p_source: tl.tensor, p_destination: tl.tensor, page_vectors: tl.int32, BLOCK: tl.constexpr
) -> None:
    # The factor tells the compiler that addresses and mask go by four words, so that it loads and stores vectors.
    page_words = page_vectors * 4
    chunks = tl.cdiv(page_words, BLOCK)
    i_page = tl.program_id(0) // chunks
    o_words = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(p_source + i_page).to(tl.int64) * page_words
    destination = tl.load(p_destination + i_page).to(tl.int64) * page_words
    b_words = tl.load(p_arena + source + o_words, mask=o_words < page_words)
    tl.store(p_arena + destination + o_words, b_words, mask=o_words < page_words)


@triton.jit(do_not_specialize=["p_pages", "page_vectors", "word"])
def _fill_kernel(
    p_arena: tl.tensor, p_pages: tl.tensor, page_vectors: tl.int32, word: tl.int32, BLOCK: tl.constexpr
) -> None:
    page_words = page_vectors * 4
    chunks = tl.cdiv(page_words, BLOCK)
    o_words = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(p_pages + tl.program_id(0) // chunks).to(tl.int64) * page_words
    tl.store(p_arena + page + o_words, tl.zeros([BLOCK], tl.int32) + word, mask=o_words < page_words)


@triton.jit(do_not_specialize=["p_buffer", "p_index", "p_value", "size", "n"])
def _scatter_kernel(
    p_buffer: tl.tensor, p_index: tl.tensor, p_value: tl.tensor, size: tl.int64, n: tl.int32, BLOCK: tl.constexpr
) -> None:
    o_entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_index = tl.load(p_index + o_entries, mask=o_entries < n, other=-1)
    inside = b_index != -1  # NOWHERE
    tl.device_assert((b_index >= 0) & (b_index < size), "scatter: index outside the buffer", mask=inside)
    b_value = tl.load(p_value + o_entries, mask=inside)
    tl.store(p_buffer + b_index, b_value, mask=inside)


@triton.jit
def _lookup(
    p_tables: tl.tensor,
    size: tl.int64,
    table_at: tl.int64,
    table_size: tl.int64,
    blocks_at: tl.int64,
    block_columns: tl.int64,
    b_row: tl.tensor,
    b_column: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Physical pages of entries of the block table, 0 where not `inside`."""
    o_blocks = blocks_at + b_row.to(tl.int64) * block_columns + b_column
    tl.device_assert((b_row >= 0) & (o_blocks < size), "translate: row outside the block table", mask=inside)
    tl.device_assert((b_column >= 0) & (b_column < block_columns), "translate: column outside it", mask=inside)
    b_virtual = tl.load(p_tables + o_blocks, mask=inside, other=0)
    tl.device_assert((b_virtual >= 0) & (b_virtual < table_size), "translate: id outside the page table", mask=inside)
    return tl.load(p_tables + table_at + b_virtual, mask=inside, other=0)


@triton.jit(
    do_not_specialize=[
        *("p_tables", "p_rows", "p_first", "p_end", "p_sequence", "p_position", "p_page_table", "p_slots"),
        *("size", "table_at", "table_size", "blocks_at", "block_columns", "page_table_stride"),
        *("tokens", "tiles", "table_programs"),
    ]
)
def _translate_kernel(
    p_tables: tl.tensor,
    p_rows: tl.tensor,
    p_first: tl.tensor,
    p_end: tl.tensor,
    p_sequence: tl.tensor,
    p_position: tl.tensor,
    p_page_table: tl.tensor,
    p_slots: tl.tensor,
    size: tl.int64,
    table_at: tl.int64,
    table_size: tl.int64,
    blocks_at: tl.int64,
    block_columns: tl.int64,
    page_table_stride: tl.int64,
    tokens: tl.int32,
    tiles: tl.int32,
    table_programs: tl.int32,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pid = tl.program_id(0)
    if pid < table_programs:  # every `tiles`-th tile of one sequence's columns
        i_sequence = pid // tiles
        row = tl.load(p_rows + i_sequence)
        end = tl.load(p_end + i_sequence)
        p_line = p_page_table + i_sequence.to(tl.int64) * page_table_stride
        for column in range(tl.load(p_first + i_sequence) + (pid % tiles) * BLOCK, end, tiles * BLOCK):
            o_column = column + tl.arange(0, BLOCK)
            wanted = o_column < end
            b_read = _lookup(p_tables, size, table_at, table_size, blocks_at, block_columns, row, o_column, wanted)
            tl.store(p_line + o_column, b_read, mask=wanted)
    else:  # a run of the flat batch
        o_token = (pid - table_programs) * BLOCK + tl.arange(0, BLOCK)
        b_sequence = tl.load(p_sequence + o_token, mask=o_token < tokens, other=-1)
        real = b_sequence >= 0
        b_position = tl.load(p_position + o_token, mask=real, other=0)
        b_row = tl.load(p_rows + b_sequence, mask=real, other=0)
        b_column = b_position // PAGE_SIZE
        b_page = _lookup(p_tables, size, table_at, table_size, blocks_at, block_columns, b_row, b_column, real)
        b_slot = b_page.to(tl.int64) * PAGE_SIZE + b_position % PAGE_SIZE
        tl.store(p_slots + o_token, tl.where(b_page > 0, b_slot, -1), mask=o_token < tokens)


def copy_pages(arena: Tensor, page_bytes: int, source: Tensor, destination: Tensor) -> None:
    """`arena[destination[i] * page_bytes ..] = arena[source[i] * page_bytes ..]`, whole pages.

    Args:
        arena: uint8 [bytes], starting on 16 bytes.
        page_bytes: a multiple of 16.
        source: int32 [n], physical pages.
        destination: int32 [n], physical pages; none overlaps another or a source (what `Moves` and `Copies` promise).
    """
    words, programs = _page_grid(arena, page_bytes, source)
    assert len(destination) == len(source)
    assert destination.dtype == torch.int32
    if programs:
        _copy_kernel[(programs,)](words, source, destination, page_bytes // VECTOR_BYTES, BLOCK=COPY_BYTES // 4)


def fill_pages(arena: Tensor, page_bytes: int, pages: Tensor, value: int) -> None:
    """Set every byte of those pages (int32 [n]) to `value`, 0..255: 0xFF is NaN in every dtype a page can have."""
    assert 0 <= value <= 0xFF, f"{value} is not a byte"
    words, programs = _page_grid(arena, page_bytes, pages)
    word = int.from_bytes(bytes([value] * 4), "little", signed=True)
    if programs:
        _fill_kernel[(programs,)](words, pages, page_bytes // VECTOR_BYTES, word, BLOCK=COPY_BYTES // 4)


def _page_grid(arena: Tensor, page_bytes: int, pages: Tensor) -> tuple[Tensor, int]:
    """The arena as int32 words, and how many programs cover those pages."""
    assert arena.dtype == torch.uint8
    assert arena.data_ptr() % VECTOR_BYTES == 0, "the arena must start on 16 bytes"
    assert page_bytes > 0
    assert page_bytes % VECTOR_BYTES == 0, f"a page of {page_bytes} bytes is no multiple of {VECTOR_BYTES}"
    assert pages.dtype == torch.int32
    programs = len(pages) * triton.cdiv(page_bytes, COPY_BYTES)
    assert programs < _INT32_END, f"{len(pages)} pages of {page_bytes} bytes are too many for one launch"
    return arena[: len(arena) // page_bytes * page_bytes].view(torch.int32), programs


def scatter(buffer: Tensor, index: Tensor, value: Tensor, n: int) -> None:
    """`buffer[index[i]] = value[i]` for the first n entries.

    Args:
        buffer: int32 [m], contiguous.
        index: int32 [>= n], NOWHERE or distinct: of two writes to one entry either may be the one that stays.
        value: int32 [>= n].
        n: entries to look at, may be 0.
    """
    assert buffer.dtype == index.dtype == value.dtype == torch.int32
    assert 0 <= n <= min(len(index), len(value))
    if n:
        _scatter_kernel[(triton.cdiv(n, ENTRIES),)](buffer, index, value, len(buffer), n, BLOCK=ENTRIES)


def translate(
    tables: Tensor,
    rows: Tensor,
    first: Tensor,
    end: Tensor,
    sequence_of: Tensor,
    position: Tensor,
    page_table: Tensor,
    slots: Tensor,
    *,
    table_at: int,
    table_size: int,
    blocks_at: int,
    block_columns: int,
    page_size: int,
    columns: int,
) -> None:
    """Make one group's virtual page ids physical, for all layers of a step: where to read and where to write.

        page_table[s, c] = page(rows[s], c)                                     for c in [first[s], end[s])
        slots[t] = page(rows[sequence_of[t]], position[t] // page_size) * page_size + position[t] % page_size

    with `page(row, c) = tables[table_at + tables[blocks_at + row * block_columns + c]]`. A slot is -1 where the page
    is 0 (the group has none) and where `sequence_of[t]` is negative (padding). Other entries of `page_table` keep
    what they held. Slots do not come from `page_table`: columns may be wanted that hold no token of the step, and
    the reverse.

    Args:
        tables: int32 [m], contiguous: the page tables of all groups and the block table.
        rows: int32 [S], the row of the block table of each sequence of the step.
        first: int32 [S], the first column wanted.
        end: int32 [S], one past the last; `end <= first` wants none.
        sequence_of: int32 [T], the sequence of each token of the flat batch, an index into `rows`.
        position: int32 or int64 [T], the token's position in its sequence.
        page_table: int32 [>= S, columns], unit stride along columns; written.
        slots: int64 [T], contiguous; written.
        table_at: where the group's page table begins in `tables`.
        table_size: how many entries it has: ids of its space + 1.
        blocks_at: where the block table begins.
        block_columns: entries per row of the block table.
        page_size: tokens per page, a constant of the model (compiled in).
        columns: `end - first` is never more; may be 0. More of them than there are take programs that end at once.
    """
    assert all(x.dtype == torch.int32 for x in (tables, rows, first, end, sequence_of, page_table))
    assert position.dtype in (torch.int32, torch.int64)
    assert slots.dtype == torch.int64
    assert len(rows) == len(first) == len(end) <= len(page_table)
    assert len(sequence_of) == len(position) == len(slots)
    assert page_table.stride(1) == 1
    assert columns <= min(block_columns, page_table.shape[1])
    tiles = min(triton.cdiv(max(columns, 0), ENTRIES), max(1, _TABLE_PROGRAMS // max(1, len(rows))))
    table_programs = len(rows) * tiles
    programs = table_programs + triton.cdiv(len(slots), ENTRIES)
    if not programs:
        return
    _translate_kernel[(programs,)](
        tables,
        rows,
        first,
        end,
        sequence_of,
        position,
        page_table,
        slots,
        len(tables),
        table_at,
        table_size,
        blocks_at,
        block_columns,
        page_table.stride(0),
        len(slots),
        tiles,
        table_programs,
        PAGE_SIZE=page_size,
        BLOCK=ENTRIES,
    )
