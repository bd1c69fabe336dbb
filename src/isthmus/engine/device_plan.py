"""A step as the arrays a device needs: all of it worked out on the host with NumPy, nothing read back.

One int32 buffer on the device, `tables`, holds the block table and every group's page table one behind the other:

    [block table: max_num_seqs x columns] [page table of group 0: num_ids + 1] [of group 1] ...

so that all table writes of a step, whatever they are for, are one scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.step import Step
from isthmus.kernels.plan import MAX_CHUNK, plan_decode, plan_prefill
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
    num_ids: int
    at: Mapping[str, int]  # first entry of each group's page table
    size: int

    @classmethod
    def of(cls, groups: Sequence[Group], num_ids: int, num_rows: int, max_model_len: int) -> Tables:
        page_size = groups[0].spec.page_size
        columns = -(-max_model_len // page_size)
        start = num_rows * columns
        at = {group.name: start + i * (num_ids + 1) for i, group in enumerate(groups)}
        size = start + len(groups) * (num_ids + 1)
        assert size < 2**31, f"{size:,} table entries do not fit int32: use larger pages"
        return cls(num_rows, columns, page_size, num_ids, at, size)


@dataclass(frozen=True)
class PageOp:
    """One operation of a delta on the bytes of the arena, in order."""

    group: str
    source: Int32
    destination: Int32 | None  # None: the pages are free now


@dataclass(frozen=True)
class GroupPlan:
    """What one group reads in a step."""

    first: Int32  # [S], first column of cached tokens that a query of the sequence sees
    end: Int32  # [S], behind the last one
    items: Int32 | None  # [n, 8], see `plan_decode`
    tiles: Int32 | None  # [n, 8], see `plan_prefill`


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
    groups: Mapping[str, GroupPlan]
    decode: bool  # every sequence has one token

    @classmethod
    def of(
        cls, step: Step, groups: Sequence[Group], tables: Tables, tile: Mapping[str, int], targets: Mapping[str, int]
    ) -> DevicePlan:
        """Work out a step.

        tile: queries of one prefill tile per group.
        targets: how many items a decode is worth cutting into, per group.
        """
        counts = np.diff(step.query_start).astype(np.int64)
        assert len(counts) > 0
        assert (counts > 0).all()
        decode = len(step.tokens) == len(counts)
        past = step.past.astype(np.int64)
        start = step.query_start[:-1].astype(np.int64)
        if decode:
            sequence_of = np.arange(len(counts), dtype=np.int32)
            positions = step.past
        else:
            sequence_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            positions = (np.arange(len(step.tokens)) + np.repeat(past - start, counts)).astype(np.int32)
        index, value = _table_writes(step, tables)
        plans = {g.name: _group_plan(g, step, start, counts, past, tile[g.name], targets[g.name]) for g in groups}
        return cls(index, value, _page_ops(step), step.tokens, positions, sequence_of, step.rows, plans, decode)


def most_items(lanes: int, target: int, max_model_len: int) -> int:
    """So many decodes are never cut into more items (see `plan_decode`): room that a captured graph reads them from."""
    return lanes + max(2 * target, lanes * -(-max_model_len // MAX_CHUNK))


def _table_writes(step: Step, tables: Tables) -> tuple[Int32, Int32]:
    writes = step.block_writes
    index = [writes.row.astype(np.int64) * tables.columns + writes.column]
    value = [writes.virtual]
    for op in step.delta.ops:
        if isinstance(op, Writes):
            index.append(tables.at[op.group] + op.virtual.astype(np.int64))
            value.append(op.physical)
    where, what = np.concatenate(index), np.concatenate(value)
    if len(where) > 1:  # the last write of an entry is the one that counts; nothing reads tables in between
        where, last = np.unique(where[::-1], return_index=True)
        what = what[::-1][last]
    return where.astype(np.int32), what.astype(np.int32)


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


def _group_plan(
    group: Group, step: Step, start: Int64, counts: Int64, past: Int64, tile: int, target: int
) -> GroupPlan:
    page_size, window = group.spec.page_size, group.window
    low = np.zeros_like(past) if window is None else np.maximum(past - window + 1, 0)
    single = counts == 1
    # One token's own row is read from its page; those of a chunk come from the activations.
    end = np.where(single, past + 1, past)
    first = np.minimum(low, end)
    items = tiles = None
    if single.any():
        which = np.flatnonzero(single)
        items, _ = plan_decode(
            start[which],
            which,
            first[which],
            end[which],
            target_items=target,
        )
    if not single.all():
        which = np.flatnonzero(~single)
        bounds = np.stack((start[which], start[which] + counts[which]))
        tiles = plan_prefill(bounds, past[which], which, tile, window)
    return GroupPlan((first // page_size).astype(np.int32), (-(-end // page_size)).astype(np.int32), items, tiles)
