"""A plan for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table

from isthmus.plan.batch import Batch
from isthmus.plan.figures import Fit, Side
from isthmus.plan.planner import Plan


def tables(plan: Plan) -> Iterator[RenderableType]:
    """What to print, one thing below the other."""
    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    yield f"{plan.model}: {plan.dtype}, caches in {plan.cache_dtype}, pages of {plan.page_size} tokens, {ranks}"
    yield f"shape from {plan.source}"
    yield _budget(plan)
    yield _groups(plan)
    ratios = [group.every_layer for group in plan.groups if group.sharing]
    if ratios:
        yield f"stored once: rows of every layer would take {max(ratios):.2f} times the bytes"
    yield _tables(plan)
    yield "virtual page ids: " + ", ".join(f"{count:,} of {space}" for space, count in _own(plan).ids.items())
    yield _fits(plan)
    if plan.static is not None and plan.static.walls is not None:
        yield f"static walls for {plan.static_for}: {_split(plan.static.walls)}"
    else:
        yield f"static: {plan.static_for}"
    if plan.batch is not None:
        yield _batch(plan.batch, kinds=len(plan.groups))
    yield from (f"note: {note}" for note in plan.notes)


def _grid(title: str, *columns: str, left: int = 1) -> Table:
    """`left`: how many columns are words."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i > 0)
    return table


def _budget(plan: Plan) -> Table:
    money = plan.budget
    grid = _grid("\narena of a rank", "", "bytes")
    grid.add_column("from")
    if money.gpu_bytes is not None and money.utilization is not None:
        grid.add_row(f"memory of {money.gpu}", f"{money.gpu_bytes:,}", money.gpu_source)
        used = int(money.gpu_bytes * money.utilization)
        grid.add_row("of which to be used", f"{used:,}", f"--gpu-memory-utilization {money.utilization}")
    grid.add_row("weights", f"{money.weight_bytes:,}", money.weight_source)
    if money.reserve_bytes is not None:
        grid.add_row("reserve", f"{money.reserve_bytes:,}", money.reserve_source)
    grid.add_row("arena", f"{money.arena_bytes:,}", money.arena_source)
    grid.add_row("null pages in it", f"{plan.null_bytes:,}", "the widest page")
    return grid


def _groups(plan: Plan) -> Table:
    grid = _grid(
        "\nlayer groups", "group", "kind", "window", "layers", "bytes a token", "bytes a page", "most of a sequence",
        left=2,
    )  # fmt: skip
    for group in plan.groups:
        shared = "" if group.sharing == 0 else f" + {group.sharing} sharing"
        grid.add_row(
            group.name,
            group.kind,
            _number(group.window),
            f"{group.layers}{shared}",
            _number(group.token_bytes),
            f"{group.page_bytes:,}",
            f"{group.sequence_bytes:,}",
        )
    return grid


def _tables(plan: Plan) -> Table:
    side = _own(plan)
    grid = _grid("\ntables (int32)", "table", "entries", "bytes")
    for name, size in side.page_tables.items():
        grid.add_row(f"pages of {name}", f"{size // 4:,}", f"{size:,}")
    grid.add_row(
        f"blocks of {plan.max_num_seqs} sequences", f"{plan.block_table_bytes // 4:,}", f"{plan.block_table_bytes:,}"
    )
    return grid


def _fits(plan: Plan) -> Table:
    static = plan.static
    names = [group.name for group in plan.groups]
    grid = _grid(f"\nsequences that fit together, of at most {plan.max_model_len:,} tokens", "cached tokens of each",
        "unified", "static", "gain", *(f"in {name}" for name in names))  # fmt: skip
    grid.add_column("binds first")
    for i, fit in enumerate(plan.unified.fits):
        other = None if static is None else static.fits[i]
        grid.add_row(
            f"{fit.tokens:,}",
            f"{fit.sequences:,}",
            "-" if other is None else f"{other.sequences:,}",
            _ratio(fit, other),
            *(_share(fit.bytes[name], plan.budget.arena_bytes) for name in names),
            fit.binds,
        )
    grid.add_row("tokens in all", f"{plan.unified.tokens:,}", "-" if static is None else f"{static.tokens:,}")
    return grid


def _batch(batch: Batch, kinds: int) -> Table:
    left_out = f", {batch.left_out:,} longer ones left out" if batch.left_out else ""
    grid = _grid(
        f"\ndry run of {batch.requests:,} requests{left_out}: mean prompt {batch.prompt_tokens:,.0f}, "
        f"output {batch.output_tokens:,.0f}",
        "memory", "steps", "output tokens a step",
    )  # fmt: skip
    grid.add_column("")
    grid.add_row("unified", f"{batch.unified_steps:,}", f"{batch.unified_running:,.1f}", "")
    if batch.static_steps is not None and batch.static_walls is not None and batch.gain is not None:
        found = f"{_split(batch.static_walls)} ({batch.static_splits} tried)"
        grid.add_row("static", f"{batch.static_steps:,}", f"{batch.static_running:,.1f}", found)
        grid.add_row("gain", f"{batch.gain:.3f} x")
    elif kinds > 1:
        grid.add_row("static", "-", "-", "no split holds every request")
    return grid


def _own(plan: Plan) -> Side:
    """How serve would share the arena."""
    if plan.memory == "unified":
        return plan.unified
    assert plan.static is not None
    return plan.static


def _split(walls: Mapping[str, int]) -> str:
    whole = sum(walls.values())
    return ", ".join(f"{name} {size / whole:.1%}" for name, size in walls.items())


def _ratio(fit: Fit, other: Fit | None) -> str:
    return "-" if other is None or other.sequences == 0 else f"{fit.sequences / other.sequences:.2f} x"


def _share(size: int, arena: int) -> str:
    return f"{size / arena:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
