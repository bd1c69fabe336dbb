"""A step as the arrays a device needs: all of it worked out on the host with NumPy, nothing read back.

One int32 buffer on the device, `tables`, holds the block table and every group's page table one behind the other:

    [block table: max_num_seqs x columns] [page table of group 0: ids of its space + 1] [of group 1] ...

so that all table writes of a step, whatever they are for, are one scatter. A sequence's state page has no row of a
block table: a step names its id, which is an entry of the state group's page table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from isthmus.engine import capacity
from isthmus.engine.step import Step
from isthmus.kernels.plan import (
    DecodeWork,
    PrefillWork,
    cut_chunks,
    dearest_first,
    most_parts,
    plan_decode,
    split_long,
)
from isthmus.memory import Copies, Frees, Group, Moves, Writes

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NOBODY = -1
"""`sequence_of` of a padding token."""


@dataclass(frozen=True)
class Tables:
    """Where each table lies in the buffer `tables`."""

    num_rows: int
    columns: int  # of the block table
    page_size: int
    num_ids: Mapping[str, int]  # of each group
    at: Mapping[str, int]  # first entry of each group's page table
    size: int
    mark: Int32 = field(repr=False, compare=False)  # [size], scratch of `DevicePlan.of`; means nothing between calls

    @classmethod
    def of(cls, groups: Sequence[Group], num_ids: Mapping[str, int], num_rows: int, max_model_len: int) -> Tables:
        """num_ids: capacity of each id space."""
        page_size = capacity.page_size(groups)
        columns = -(-max_model_len // page_size)
        at, size, ids = {}, num_rows * columns, {group.name: num_ids[group.space] for group in groups}
        for name, count in ids.items():
            at[name], size = size, size + count + 1
        assert size < 2**31, f"{size:,} table entries do not fit int32: use larger pages"
        return cls(num_rows, columns, page_size, ids, at, size, np.empty(size, np.int32))


@dataclass(frozen=True)
class PageOp:
    """One operation of a delta on the bytes of the arena, in order."""

    group: str
    source: Int32
    destination: Int32 | None  # None: the pages are free now


@dataclass(frozen=True)
class Grain:
    """How the work of one group is cut."""

    tile: int  # queries of a prefill tile
    programs: int  # that decodes are shared out among, of a KV head
    tile_programs: int  # of a KV head, that work on tiles at a time


@dataclass(frozen=True)
class GroupPlan:
    """What one group reads in a step."""

    first: Int32  # [S], first column of cached tokens that a query of the sequence sees
    decodes: DecodeWork
    tiles: PrefillWork | None  # None: nobody has a chunk


@dataclass(frozen=True)
class StatePlan:
    """Where the states of a step's sequences lie, and where their tokens do. S of them."""

    entry: Int32  # [S]: of `tables`, holds the physical page
    null: int  # the entry that holds the null page
    fresh: NDArray[np.bool_]  # [S]: the state is zero
    query_start: Int64  # [S + 1]

    @property
    def decodes(self) -> Int64:
        """Sequences with one token."""
        return np.flatnonzero(np.diff(self.query_start) == 1)

    @property
    def chunks(self) -> Int64:
        """Sequences with more."""
        return np.flatnonzero(np.diff(self.query_start) > 1)

    @property
    def owner(self) -> Int64:
        """[T]: the sequence of each token."""
        return np.repeat(np.arange(len(self.entry)), np.diff(self.query_start))

    @classmethod
    def of(cls, step: Step, group: Group, tables: Tables) -> StatePlan:
        at = tables.at[group.name]
        assert len(step.states) == len(step.past)
        return cls(step.states + np.int32(at), at, step.past == 0, step.query_start.astype(np.int64))

    @classmethod
    def empty(cls, null: int) -> StatePlan:
        """Of nobody."""
        return cls(np.zeros(0, np.int32), null, np.zeros(0, np.bool_), np.zeros(1, np.int64))

    def padded(self, lanes: int, tokens: int) -> StatePlan:
        """The same and `lanes` sequences more, of so many tokens each, with the null page for a fresh state."""
        more = self.query_start[-1] + tokens * np.arange(1, lanes + 1)
        return StatePlan(
            np.concatenate((self.entry, np.full(lanes, self.null, np.int32))),
            self.null,
            np.concatenate((self.fresh, np.ones(lanes, np.bool_))),
            np.concatenate((self.query_start, more)),
        )


@dataclass(frozen=True)
class DevicePlan:
    """One step. T tokens, S sequences."""

    index: Int32  # table writes: `tables[index] = value`, each index once
    value: Int32
    pages: tuple[PageOp, ...]
    tokens: Int32  # [T], NOBODY where the row's last sampled token is meant
    positions: Int32  # [T]
    sequence_of: Int32  # [T]
    rows: Int32  # [S]
    end: Int32  # [S], behind the last column of cached tokens
    groups: Mapping[str, GroupPlan]  # of the groups with a page for so many tokens
    decode: bool  # every sequence has one token
    states: StatePlan | None  # None: the model has none

    @classmethod
    def of(
        cls,
        step: Step,
        groups: Sequence[Group],
        tables: Tables,
        grains: Mapping[str, Grain],
        chunked: Collection[str] = (),
    ) -> DevicePlan:
        """Work out a step. `grains` are by group; `chunked` are the groups whose window is a chunk."""
        start, past = step.query_start[:-1], step.past
        counts = step.query_start[1:] - start
        assert len(counts) > 0
        assert np.minimum.reduce(counts) > 0
        decode = len(step.tokens) == len(counts)
        sequence_of = np.arange(len(counts), dtype=np.int32)
        positions = past
        if not decode:
            sequence_of = np.repeat(sequence_of, counts)
            positions = np.arange(len(step.tokens), dtype=np.int32) + np.repeat(past - start, counts)
        index, value = _table_writes(step, tables)
        work = _Work.of(start, counts, past, sequence_of if decode else None)
        plans = work.plan([g for g in groups if g.space == "tokens"], tables.page_size, grains, chunked)
        end = (work.end + (tables.page_size - 1)) // tables.page_size
        states = next((StatePlan.of(step, g, tables) for g in groups if g.kind == "state"), None)
        ops = _page_ops(step)
        return cls(index, value, ops, step.tokens, positions, sequence_of, step.rows, end, plans, decode, states)

    def padded(self, size: int) -> DevicePlan:
        """The same with states for a step of `size` tokens: padding is sequences of one, or one sequence."""
        more = size - len(self.tokens)
        if self.states is None or not more:
            return self
        return replace(self, states=self.states.padded(*((more, 1) if self.decode else (1, more))))


def most_items(lanes: int, programs: int) -> int:
    """So many decodes are never cut into more items (see `plan_decode`): room that a captured graph reads them from."""
    return lanes + programs


def most_tiles(tokens: int, sequences: int, grain: Grain) -> int:
    """Rows of a step with chunks that is padded to so many tokens, at most.

    Every chunk, of two tokens at least, ends in a tile that may not be full, and so does what is padding's.
    """
    return tokens // grain.tile + min(tokens // 2, sequences) + 1 + most_parts(grain.tile_programs)


def _table_writes(step: Step, tables: Tables) -> tuple[Int32, Int32]:
    writes = step.block_writes
    entries = [op for op in step.delta.ops if isinstance(op, Writes)]
    if not entries and not len(writes.row):
        return writes.row, writes.virtual
    index = [writes.row * tables.columns + writes.column]  # int32 holds it: so many entries there are not
    where = np.concatenate(index + [op.virtual + tables.at[op.group] for op in entries])
    what = np.concatenate([writes.virtual, *(op.physical for op in entries)])
    # The last write of an entry is the one that counts; nothing reads tables in between.
    order = np.arange(len(where), dtype=np.int32)
    tables.mark[where] = order
    last = tables.mark[where] == order
    return (where, what) if np.count_nonzero(last) == len(last) else (where[last], what[last])


def _page_ops(step: Step) -> tuple[PageOp, ...]:
    ops: list[PageOp] = []
    for op in step.delta.ops:
        if isinstance(op, Moves | Copies):
            ops.append(PageOp(op.group, op.source, op.destination))
            if isinstance(op, Moves):
                ops.append(PageOp(op.group, op.source, None))
        elif isinstance(op, Frees):
            ops.append(PageOp(op.group, op.page, None))
    return tuple(ops)


@dataclass(frozen=True)
class _Work:
    """What the groups' plans have in common. The C sequences with a chunk, the D with one token, all S in order."""

    start: Int32  # [S], first token of each sequence in the batch
    counts: Int32  # [S]
    past: Int32  # [S]
    end: Int32  # [S], behind the last cached token that is read: a chunk's own come from the activations
    chunks: Int32 | None  # [C] of the sequences; None if C = 0
    decodes: Int32  # [D]

    @classmethod
    def of(cls, start: Int32, counts: Int32, past: Int32, decodes: Int32 | None) -> _Work:
        """decodes: all sequences, if that is what they are."""
        if decodes is not None:
            return cls(start, counts, past, past + 1, None, decodes)
        single = counts == 1
        found, chunks = (np.flatnonzero(which).astype(np.int32) for which in (single, ~single))
        return cls(start, counts, past, past + single, chunks, found)

    def plan(
        self,
        groups: Sequence[Group],
        page_size: int,
        grains: Mapping[str, Grain],
        chunked: Collection[str],
    ) -> dict[str, GroupPlan]:
        """What each group reads."""
        none = np.zeros(len(self.past), np.int32)
        firsts = [self._first(group, group.name in chunked, none) for group in groups]
        decodes, tiles = self._decodes(groups, firsts, grains), self._tiles(groups, grains, chunked)
        parts = zip(groups, firsts, decodes, tiles, strict=True)
        return {group.name: GroupPlan(first // page_size, work, cut) for group, first, work, cut in parts}

    def _first(self, group: Group, chunked: bool, none: Int32) -> Int32:
        """The first token that a query of each sequence sees, as in `isthmus.kernels.reference.Sight`; `none`: 0s."""
        if group.window is None:
            return none
        return self.past - self.past % group.window if chunked else np.maximum(self.past - (group.window - 1), 0)

    def _decodes(
        self, groups: Sequence[Group], firsts: Sequence[Int32], grains: Mapping[str, Grain]
    ) -> list[DecodeWork]:
        """Groups that read the same have one plan: as long as nobody is longer than the window, say."""
        d, start, end = self.decodes, self.start, self.end
        some = len(d) < len(start)
        if some:
            start, end = start[d], end[d]
        plans: dict[tuple[int, bytes], DecodeWork] = {}
        found = []
        for group, every in zip(groups, firsts, strict=True):
            first, programs = every[d] if some else every, grains[group.name].programs
            key = programs, first.tobytes()
            if key not in plans:
                plans[key] = plan_decode(start, d, first, end, programs=programs)
            found.append(plans[key])
        return found

    def _tiles(
        self, groups: Sequence[Group], grains: Mapping[str, Grain], chunked: Collection[str]
    ) -> Sequence[PrefillWork] | Sequence[None]:
        if (c := self.chunks) is None:
            return [None] * len(groups)
        bounds = np.stack((self.start[c], self.start[c] + self.counts[c]))
        blocks = {grains[group.name].tile for group in groups}
        cut = {block: cut_chunks(bounds, self.past[c], c, block) for block in blocks}
        found = []
        for group in groups:
            grain, window = grains[group.name], group.window
            tiles = dearest_first(cut[grain.tile], grain.tile, window)
            cyclic = group.name in chunked
            found.append(split_long(tiles, grain.tile, window, chunked=cyclic, programs=grain.tile_programs))
        return found
