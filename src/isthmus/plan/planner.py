"""From a model, settings and a budget to a plan: one object that prints as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.engine import capacity, sizing
from isthmus.engine.config import EngineConfig
from isthmus.errors import ConfigError
from isthmus.memory import Pool
from isthmus.plan import batch
from isthmus.plan.budget import Budget
from isthmus.plan.figures import GroupFigures, Side, block_table_bytes, lengths_upto
from isthmus.plan.shape import Shape
from isthmus.plan.workload import Workload


@dataclass(frozen=True)
class Plan:
    """Everything that is known before there is a device. Bytes are of one rank, tokens and sequences of them all."""

    model: str
    source: str
    dtype: str
    cache_dtype: str
    ranks: int
    page_size: int
    memory: str  # "unified" or "static": what serve would do with these settings
    context: int  # tokens that the model takes
    max_model_len: int  # tokens of prompt and output that a sequence can have
    max_num_seqs: int
    budget: Budget
    null_bytes: int  # of the arena, where padding is written
    groups: tuple[GroupFigures, ...]
    block_table_bytes: int
    unified: Side
    static: Side | None
    static_for: str  # what the walls are best for, or who chose them; or why there are none
    batch: batch.Batch | None
    notes: tuple[str, ...]


def make(shape: Shape, config: EngineConfig, money: Budget, workload: Workload | None) -> Plan:
    """The plan of `serve` with these settings in this arena.

    ConfigError as `serve` gives it where settings are impossible, and if no request of the workload fits.
    """
    groups, size, memory = shape.layout.groups, money.arena_bytes, config.memory
    context = config.model.max_model_len or shape.layout.max_model_len
    own = Pool(size, groups, walls=sizing.walls(memory, groups, size, context))
    longest = sizing.max_model_len(config, shape.layout.max_model_len, own)
    lengths = lengths_upto(longest - 1)
    if workload is not None:
        workload = workload.within(longest)
    static, static_for = _static(shape, config, own, workload, lengths)
    return Plan(
        model=shape.name,
        source=shape.source,
        dtype=shape.dtype,
        cache_dtype=shape.cache_dtype,
        ranks=shape.ranks,
        page_size=memory.page_size,
        memory=memory.memory,
        context=shape.layout.max_model_len,
        max_model_len=longest,
        max_num_seqs=config.scheduler.max_num_seqs,
        budget=money,
        null_bytes=own.null_bytes,
        groups=tuple(GroupFigures.of(shape.layout, group, size, longest - 1) for group in groups),
        block_table_bytes=block_table_bytes(groups, config.scheduler.max_num_seqs, longest),
        unified=Side.of(own if own.walls is None else Pool(size, groups), config, lengths),
        static=static,
        static_for=static_for,
        batch=None if workload is None else batch.run(config.scheduler, groups, size, workload),
        notes=tuple(_notes(shape, money)),
    )


def _static(
    shape: Shape, config: EngineConfig, own: Pool, workload: Workload | None, lengths: Sequence[int]
) -> tuple[Side | None, str]:
    """The arena with walls: those that were asked for, else the best for the workload."""
    groups, size = shape.layout.groups, own.arena_bytes
    if own.walls is not None:
        chosen = "--static-split" if config.memory.static_split is not None else _shape(config.memory.static_workload)
        return Side.of(own, config, lengths), chosen
    if len(groups) < 2:
        return None, "one kind of cache: there is nothing to split"
    requests = [config.memory.static_workload] if workload is None else workload.lengths
    try:
        walls = capacity.best_walls(groups, size, requests)
    except ConfigError as error:
        return None, str(error)
    wanted = _shape(config.memory.static_workload) if workload is None else "the workload"
    return Side.of(Pool(size, groups, walls=walls), config, lengths), wanted


def _shape(lengths: tuple[int, int]) -> str:
    return f"prompts of {lengths[0]:,} and outputs of {lengths[1]:,}"


def _notes(shape: Shape, money: Budget) -> list[str]:
    notes = []
    if shape.ranks > 1:
        notes.append(
            f"planned for {shape.ranks} ranks: bytes are of one; the engine runs on one rank and cannot serve this yet"
        )
    if shape.stored and money.weight_source != "as given":
        notes.append(f"weights count every parameter in {shape.dtype}, but {shape.stored}: --weights says otherwise")
    return notes
