"""The arena of a frame as intervals of bytes, and as one line of characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Part: TypeAlias = tuple[str, int | None, int, int]
"""`(state, group, lo, hi)` in bytes: `live`, `cached` and `hole` of a group; `gap`, `null` and `tail` of none."""


def parts_of(frame: Mapping[str, Any]) -> list[Part]:
    """All of the arena, low to high. Pages lie where they are as far as cells tell; in a cell live ones come first."""
    pool = frame["pool"]
    found: list[Part] = [("null", None, 0, pool["null_bytes"])]
    regions = {region["name"]: region for region in frame["regions"]}
    for index, group in enumerate(pool["groups"]):
        lo, hi = group["frontiers"]
        if lo < hi:
            found.append(("gap", None, found[-1][3], lo))
            found += _region_parts(regions[group["name"]], index, group["page_bytes"])
    top = pool["arena_bytes"] - pool["tail_bytes"]
    found += [("gap", None, found[-1][3], top), ("tail", None, top, pool["arena_bytes"])]
    return [part for part in found if part[2] < part[3]]


def _region_parts(region: Mapping[str, Any], index: int, page_bytes: int) -> Iterator[Part]:
    pages, runs = region["pages"], region["runs"]
    cell = region["lo"] // pages
    for cells, live, cached in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        edge, end = max(region["lo"], cell * pages), min(region["hi"], (cell + cells) * pages)
        for state, n in (("live", cells * live), ("cached", cells * cached)):
            yield state, index, edge * page_bytes, (edge + n) * page_bytes
            edge += n
        yield "hole", index, edge * page_bytes, end * page_bytes
        cell += cells


def strip(parts: Sequence[Part], width: int) -> list[tuple[str, int | None]]:
    """`(state, group)` of the most bytes in each of `width` equal cells of the arena."""
    total = parts[-1][3]
    weights: list[dict[tuple[str, int | None], int]] = [{} for _ in range(width)]
    for state, group, lo, hi in parts:
        for i in range(lo * width // total, min(width, -(-hi * width // total))):
            inside = min(hi * width, (i + 1) * total) - max(lo * width, i * total)
            weights[i][state, group] = weights[i].get((state, group), 0) + inside
    return [max(cell, key=lambda kind: cell[kind]) for cell in weights]
