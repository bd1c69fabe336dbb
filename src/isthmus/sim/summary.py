"""What came of a simulation, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.sim.simulation import Outcome
from isthmus.sim.tally import Float64, Int64, Tally

Bool = np.typing.NDArray[np.bool_]
PERCENTILES = (50, 90, 99)
_POINTS = 600


@dataclass(frozen=True)
class Limits:
    """When a request was served well: its first token and the mean gap between its tokens came within these."""

    ttft: float = float("inf")  # seconds
    itl: float = float("inf")

    def good(self, tally: Tally) -> Bool:
        """Of each request, was it? One that was refused was not."""
        output = np.array([arrival.output for arrival in tally.arrivals])
        gap = (tally.end - tally.first) / np.maximum(output - 1, 1)
        good: Bool = (ttft(tally) <= self.ttft) & (gap <= self.itl)  # nan is within nothing
        return good


def summary(outcome: Outcome, limits: Limits) -> dict[str, Any]:
    """Everything that is reported of one side. Seconds, bytes, and shares of 1."""
    tally, seconds = outcome.tally, max(outcome.seconds, 1e-9)
    done, good = ~np.isnan(tally.end), limits.good(tally)
    arrivals = tally.arrivals
    prompt = sum(a.input for a, d in zip(arrivals, done.tolist(), strict=True) if d)
    output = sum(a.output for a, d in zip(arrivals, done.tolist(), strict=True) if d)
    gaps, counts = tally.gaps()
    return {
        "walls": None if outcome.walls is None else dict(outcome.walls),
        "requests": len(arrivals),
        "finished": int(done.sum()),
        "refused": len(tally.refused),
        "first_refusal": next(iter(tally.refused.values()), None),
        "good": int(good.sum()),
        "goodput_per_second": float(good.sum() / seconds),
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "computed_tokens": outcome.computed_tokens,
        "output_tokens_per_second": output / seconds,
        "ttft": _spread(ttft(tally)[done]),
        "itl": _weighted(gaps, counts),
        "e2e": _spread((tally.end - _times(tally))[done]),
        "waited_for": dict(sorted(tally.waited_for.items())),
        "preemptions": int(tally.preemptions.sum()),
        "refused_demands": outcome.refusals,
        "cache": _cache(outcome, max(prompt, 1)),
        "moved_bytes": tally.moved_bytes,
        "copied_bytes": tally.copied_bytes,
        "arena": _arena(outcome),
        "running": {"mean": tally.mean("running"), "most": float(tally.series("running").max(initial=0))},
        "waiting": {"mean": tally.mean("waiting"), "most": float(tally.series("waiting").max(initial=0))},
        "by_trace": _by_trace(tally, good, seconds),
    }


def ttft(tally: Tally) -> Float64:
    """Seconds to the first token of each request."""
    return tally.first - _times(tally)


def _times(tally: Tally) -> Float64:
    return np.array([arrival.at for arrival in tally.arrivals])


def _spread(values: Float64) -> dict[str, float]:
    if not len(values):
        return {}
    return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def _weighted(values: Float64, counts: Int64) -> dict[str, float]:
    """As `_spread`, of ascending values that each stand for several: the smallest that so many are not above."""
    if not len(values):
        return {}
    total = np.cumsum(counts)
    at = {f"p{p}": float(values[np.searchsorted(total, total[-1] * p / 100)]) for p in PERCENTILES}
    return {"mean": float((values * counts).sum() / total[-1])} | at


def _cache(outcome: Outcome, prompt: int) -> dict[str, Any]:
    """Shares of all prompt tokens, and how often which group cut a hit."""
    tally = outcome.tally
    return {
        "hit_rate": tally.cached_tokens / prompt,
        "known_rate": tally.known_tokens / prompt,
        "restorable_rate": {name: n / prompt for name, n in sorted(tally.restorable.items())},
        "cut_by": dict(sorted(tally.cut_by.items())),
        "evicted_pages": dict(outcome.evicted_pages),
    }


def _arena(outcome: Outcome) -> dict[str, Any]:
    """Mean shares of the arena."""
    tally, size = outcome.tally, outcome.setup.arena_bytes
    kinds = {
        group.name: {part: tally.mean(f"{group.name} {part}") / size for part in ("live", "cached", "holes")}
        for group in outcome.setup.model.groups
    }
    return {"bytes": size, "groups": kinds, "gap": tally.mean("gap") / size}


def _by_trace(tally: Tally, good: Bool, seconds: float) -> list[dict[str, Any]]:
    of = np.array([arrival.trace for arrival in tally.arrivals])
    times, done = ttft(tally), ~np.isnan(tally.end)
    return [
        {
            "trace": int(trace),
            "requests": int((of == trace).sum()),
            "good": int(good[of == trace].sum()),
            "goodput_per_second": float(good[of == trace].sum() / seconds),
            "ttft": _spread(times[(of == trace) & done]),
        }
        for trace in np.unique(of).tolist()
    ]


def score(outcome: Outcome, limits: Limits) -> tuple[float, float]:
    """The higher the better: goodput, then how soon requests ended on average."""
    tally = outcome.tally
    done = ~np.isnan(tally.end)
    late = float((tally.end - _times(tally))[done].mean()) if done.any() else float("inf")
    return float(limits.good(tally).sum()) / max(outcome.seconds, 1e-9), -late


def best(scores: Sequence[tuple[float, float]]) -> int:
    """Which is highest; of equals the first."""
    return max(range(len(scores)), key=lambda i: (scores[i], -i))


def timeline(outcome: Outcome) -> dict[str, list[float]]:
    """How the arena stood over time, at most `_POINTS` moments of it."""
    samples = outcome.tally.samples[:: max(1, -(-len(outcome.tally.samples) // _POINTS))]
    return {name: [round(sample[name], 3) for sample in samples] for name in samples[0]} if samples else {}
