"""The arena over time as one interactive HTML page: style, script and data in it, nothing fetched.

The data are int32 numbers, compressed and in base 64; `_numbers` says in which order, page.js reads them in the same:

    frames     step, milliseconds, record, refusals, then per group: lo, hi, live, moved
    changes    number of rows per frame and group, then the five columns of all rows (see timeline.py)
    jumps      number per frame, then group, source, destination, pages of all
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError
from isthmus.replay import palette
from isthmus.replay.timeline import Timeline

MOST_BYTES = 5_000_000
MOST_NAMES = 600_000  # bytes of owners' names; later ones are left out


def write(timeline: Timeline, summary: list[str], path: Path) -> None:
    """Write the page; a timeline that is too large for one is halved first. ConfigError if the file cannot be."""
    text = render(timeline, summary)
    while len(text.encode()) > MOST_BYTES and len(timeline.frames) > 3:
        timeline.halve()
        text = render(timeline, summary)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {(error.strerror or str(error)).lower()}") from error


def render(timeline: Timeline, summary: list[str]) -> str:
    """The page as text."""
    numbers = _numbers(timeline)
    data = base64.b64encode(zlib.compress(numbers.astype("<i4").tobytes(), 9)).decode()
    parts = {
        "title": html.escape(f"{timeline.life.path.name}: the arena over time"),
        "style": _part("page.css").replace("/*colours*/", _colours()),
        "summary": html.escape("\n".join(summary)),
        "about": _json(_about(timeline)),
        "data": data,
        "script": _part("page.js"),
    }
    page = _part("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def _about(timeline: Timeline) -> dict[str, Any]:
    pool, names, room = timeline.life.pool, {}, MOST_NAMES
    for number, name in timeline.names.items():
        room -= len(name.encode()) + 12
        if room > 0:
            names[number] = name
    return {
        "arena": pool.arena_bytes,
        "null": pool.null_bytes,
        "walls": pool.walls is not None,
        "frames": len(timeline.frames),
        "groups": [
            {
                "name": name,
                "kind": group.kind,
                "pageBytes": group.spec.page_bytes,
                "pages": pool.num_pages(name),
                "perCell": timeline.per_cell[name],
                "cells": timeline.cells[name],
                "ids": group.space,
            }
            for name, group in pool.groups.items()
        ],
        "names": names,
        "namesLeftOut": len(timeline.names) - len(names),
    }


def _numbers(timeline: Timeline) -> NDArray[np.int32]:
    frames = timeline.frames
    columns: list[list[int]] = [
        [frame.step for frame in frames],
        [round(frame.seconds * 1000) for frame in frames],
        [frame.record for frame in frames],
        [frame.refusals for frame in frames],
    ]
    for i in range(len(timeline.groups)):
        columns += [[frame.spans[i][0] for frame in frames], [frame.spans[i][1] for frame in frames]]
        columns += [[frame.live[i] for frame in frames], [frame.moved[i] for frame in frames]]
    rows = np.concatenate([change for frame in frames for change in frame.changes])
    jumps = np.concatenate([frame.jumps for frame in frames])
    parts = [
        np.array(columns).ravel(),
        np.array([len(change) for frame in frames for change in frame.changes]),
        rows.T.ravel(),
        np.array([len(frame.jumps) for frame in frames]),
        jumps.T.ravel(),
    ]
    return np.concatenate(parts).astype(np.int32)


def _colours() -> str:
    """Custom properties of both themes."""
    blocks = []
    for groups, theme in ((palette.GROUPS, palette.LIGHT), (palette.GROUPS_DARK, palette.DARK)):
        properties = {f"group{i}": colour for i, colour in enumerate(groups)} | theme
        blocks.append("".join(f"--{name}:{colour};" for name, colour in properties.items()))
    return f":root{{{blocks[0]}}}@media (prefers-color-scheme:dark){{:root{{{blocks[1]}}}}}"


def _part(name: str) -> str:
    return resources.files("isthmus.replay").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Safe inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
