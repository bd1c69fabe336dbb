"""Pictures of a simulation: who ran, and what the arena held, over virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.errors import ConfigError
from isthmus.sim.simulation import Outcome

SUFFIXES = (".png", ".svg")
_COLOURS = ("#3b6ea5", "#d98032", "#5a9a57", "#a0529c", "#8a6d4b", "#4aa3a2")


def require(path: Path) -> None:
    """ConfigError if no picture can be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a name that ends in {' or '.join(SUFFIXES)} is due")
    _matplotlib()


def draw(path: Path, outcomes: Mapping[str, Outcome], title: str) -> None:
    """One row for each side: sequences on the left, bytes of the arena by group on the right."""
    figure = _matplotlib().Figure(figsize=(12, 1 + 2.6 * len(outcomes)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(outcomes), 2, squeeze=False, sharex=True)
    most = max(float(o.tally.series("running").max(initial=1)) for o in outcomes.values())
    for (left, right), (name, outcome) in zip(axes, outcomes.items(), strict=True):
        _sequences(left, name, outcome, most)
        _arena(right, outcome)
    for axis in axes[0]:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=7, ncols=6, frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("virtual seconds")
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _sequences(axis: Any, name: str, outcome: Outcome, most: float) -> None:
    at = outcome.tally.series("at")
    axis.plot(at, outcome.tally.series("running"), color="#222222", linewidth=0.9, label="running")
    axis.plot(at, outcome.tally.series("waiting"), color="#c23b3b", linewidth=0.9, label="waiting")
    axis.set_ylim(0, 1.5 * most)  # a queue that leaves the picture is long enough
    axis.set_ylabel(f"{name}\nsequences", fontsize=9)


def _arena(axis: Any, outcome: Outcome) -> None:
    """Stacked from the bottom: per group in use (dark), cached (light), holes (grey)."""
    tally, size = outcome.tally, outcome.setup.arena_bytes
    at, base = tally.series("at"), np.zeros(len(tally.samples))
    for i, group in enumerate(outcome.setup.model.groups):
        colour = _COLOURS[i % len(_COLOURS)]
        for part, look in (
            ("live", {"color": colour, "label": f"{group.name} in use"}),
            ("cached", {"color": colour, "alpha": 0.4, "label": f"{group.name} cached"}),
            ("holes", {"color": "#999999"}),
        ):
            top = base + tally.series(f"{group.name} {part}") / size
            axis.fill_between(at, base, top, linewidth=0, **look)
            base = top
    axis.set_ylim(0, 1)
    axis.set_ylabel("share of the arena", fontsize=9)


def _matplotlib() -> Any:
    try:
        from matplotlib import figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("--plot needs the package matplotlib: pip install 'isthmus[plot]'") from error
    return figure
