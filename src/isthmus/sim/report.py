"""What came of a simulation, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ROWS = (
    ("goodput, requests/s", "goodput_per_second", 1, ",.3f"),
    ("good of all", "good", 1, ",.0f"),
    ("refused", "refused", 1, ",.0f"),
    ("output tokens/s", "output_tokens_per_second", 1, ",.0f"),
    ("TTFT p50, ms", "ttft.p50", 1e3, ",.0f"),
    ("TTFT p99, ms", "ttft.p99", 1e3, ",.0f"),
    ("ITL p50, ms", "itl.p50", 1e3, ",.1f"),
    ("ITL p99, ms", "itl.p99", 1e3, ",.1f"),
    ("e2e p50, s", "e2e.p50", 1, ",.2f"),
    ("e2e p99, s", "e2e.p99", 1, ",.2f"),
    ("running, mean", "running.mean", 1, ",.1f"),
    ("waiting, mean", "waiting.mean", 1, ",.1f"),
    ("preemptions", "preemptions", 1, ",.0f"),
    ("cached prompt tokens", "cache.hit_rate", 1, ".1%"),
    ("moved, GB", "moved_bytes", 1e-9, ",.2f"),
    ("copied states, GB", "copied_bytes", 1e-9, ",.2f"),
    ("gap, mean", "arena.gap", 1, ".1%"),
)


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A table with a column for every side, and what it rests on."""
    work, sides = result["workload"], result["sides"]
    yield (
        f"{result['model']} on {result['machine']['name']}, arena {result['arena_bytes']:,} bytes: "
        f"{work['requests']:,} requests, {work['prompt_tokens']:,} prompt and {work['output_tokens']:,} output tokens"
    )
    width = max(14, *(len(name) + 2 for name in sides))
    yield f"{'':<24}" + "".join(f"{name:>{width}}" for name in sides)
    for title, path, scale, form in _ROWS:
        yield f"{title:<24}" + "".join(_cell(side, path, scale, form).rjust(width) for side in sides.values())
    for group in next(iter(sides.values()))["arena"]["groups"]:
        for part, title in (("live", "in use"), ("cached", "cached"), ("holes", "holes")):
            cells = (side["arena"]["groups"][group][part] for side in sides.values())
            yield f"{group + ', ' + title:<24}" + "".join(f"{cell:>{width}.1%}" for cell in cells)
        cells = (side["cache"]["restorable_rate"].get(group, 0.0) for side in sides.values())
        yield f"{group + ', restorable':<24}" + "".join(f"{cell:>{width}.1%}" for cell in cells)
    for name, side in sides.items():
        if side["walls"] is not None:
            total = sum(side["walls"].values())
            split = ", ".join(f"{group} {size / total:.1%}" for group, size in side["walls"].items())
            yield f"walls of {name}: {split}"
        if side["first_refusal"] is not None:
            yield f"refused by {name}, the first of {side['refused']:,}: {side['first_refusal']}"
    yield f"times: {result['machine']['source']}"


def _cell(side: Mapping[str, Any], path: str, scale: float, form: str) -> str:
    value: Any = side
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return "-" if value is None else format(value * scale, form)
