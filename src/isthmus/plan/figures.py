"""The figures of a plan, each from the code that serves: groups, pool, page tables, capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.engine import capacity
from isthmus.engine.config import EngineConfig
from isthmus.memory import Group, Pool
from isthmus.model.layout import ModelLayout
from isthmus.plan import ranks

LENGTHS = (1024, 8192, 32768)
"""Cached tokens of the sequences that are counted, beside the longest."""


@dataclass(frozen=True)
class GroupFigures:
    """One layer group on one rank."""

    name: str
    kind: str
    window: int | None
    layers: int  # that own bytes
    sharing: int  # that read another layer's
    page_tokens: int | None  # None: a page is one sequence's state
    page_bytes: int
    token_bytes: float | None
    sequence_bytes: int  # that the longest sequence holds at most
    pages: int  # that the whole arena would hold, null pages included: the length of the group's view
    every_layer: float  # times the bytes, if layers that share stored rows of their own

    @classmethod
    def of(cls, layout: ModelLayout, group: Group, arena_bytes: int, longest: int) -> GroupFigures:
        """`longest`: tokens that the longest sequence has cached."""
        held = max(peak[group.name] for peak in capacity.peaks(layout.groups, longest))
        state, size = group.kind == "state", group.spec.page_bytes
        return cls(
            name=group.name,
            kind=group.kind,
            window=group.window,
            layers=len(ranks.owners(group)),
            sharing=len(ranks.sharing(layout, group)),
            page_tokens=None if state else group.spec.page_size,
            page_bytes=size,
            token_bytes=None if state else group.spec.token_bytes,
            sequence_bytes=held * size,
            pages=arena_bytes // size,
            every_layer=ranks.every_layer(layout)[group.name].spec.page_bytes / size,
        )


@dataclass(frozen=True)
class Fit:
    """How many sequences of so many cached tokens fit together."""

    tokens: int
    sequences: int
    binds: str  # what keeps one more from fitting, or all of these from running
    bytes: Mapping[str, int]  # that they hold in each group at their widest


@dataclass(frozen=True)
class Side:
    """One way to share the arena: unified, or static with walls."""

    walls: Mapping[str, int] | None
    ids: Mapping[str, int]  # virtual page ids by space
    page_tables: Mapping[str, int]  # bytes by group, int32
    fits: tuple[Fit, ...]
    tokens: int  # in sequences of the greatest length and one shorter one

    @classmethod
    def of(cls, pool: Pool, config: EngineConfig, lengths: Sequence[int]) -> Side:
        """`lengths`: cached tokens, the last of the longest sequence."""
        return cls(
            walls=pool.walls,
            ids={name: space.capacity for name, space in pool.spaces.items()},
            page_tables={name: pool.table(name).entries.nbytes for name in pool.groups},
            fits=tuple(_fit(pool, config, length) for length in lengths),
            tokens=capacity.total_tokens(pool, lengths[-1], config.memory.max_total_tokens),
        )


def lengths_upto(longest: int) -> list[int]:
    """Which sequences are counted, by cached tokens, where the longest has `longest`."""
    return sorted({min(length, longest) for length in (*LENGTHS, longest)})


def block_table_bytes(groups: Sequence[Group], max_num_seqs: int, max_model_len: int) -> int:
    """A device's int32 block table: a row for each sequence that may run, a column for each of its token pages."""
    if all(group.space != "tokens" for group in groups):
        return 0
    return 4 * max_num_seqs * -(-max_model_len // capacity.page_size(groups))


def _fit(pool: Pool, config: EngineConfig, length: int) -> Fit:
    sizes = {name: group.spec.page_bytes for name, group in pool.groups.items()}
    peaks = capacity.peaks(pool.groups.values(), length)
    widest = max(peaks, key=lambda peak: sum(n * sizes[name] for name, n in peak.items()))
    count = capacity.concurrent(pool, length, config.memory.max_total_tokens)
    used = {name: count * n * sizes[name] for name, n in widest.items()}
    return Fit(length, count, _binding(pool, config, peaks, count), used)


def _binding(pool: Pool, config: EngineConfig, peaks: Sequence[Mapping[str, int]], count: int) -> str:
    """Ids are not among it: an id space is as long as the pages of its group, so bytes run out first."""
    if count >= config.scheduler.max_num_seqs:
        return f"--max-num-seqs {config.scheduler.max_num_seqs}"
    need = {name: (count + 1) * max(peak[name] for peak in peaks) for name in pool.groups}
    most = config.memory.max_total_tokens
    if most is not None and "tokens" in pool.covering:
        cap = most // capacity.page_size(pool.groups.values())
        if need[pool.covering["tokens"][0]] > cap:
            return f"--max-total-tokens {most}"
    for name in pool.walls or {}:
        region = pool.regions[name]
        if need[name] > region.last - region.first:
            return f"wall of {name}"
    return "bytes"
