"""The arena over time as a picture: across the steps, up the bytes, the groups in colour; below, what moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError
from isthmus.replay import letters, palette, png
from isthmus.replay.timeline import Frame, Int32, Timeline

Pixels = NDArray[np.uint8]

WIDTH, HEIGHT = 1200, 680
LEFT, RIGHT, TOP = 110, 24, 64
MAP = 480  # pixels of the arena
MOVES = 56  # of the bars below it
MANY = 200  # moves
_UNITS = ((1 << 30, "GIB"), (1 << 20, "MIB"), (1 << 10, "KIB"), (1, "B"))


def write(timeline: Timeline, path: Path) -> None:
    """Draw it into a PNG file. ConfigError if that cannot be written."""
    try:
        path.write_bytes(png.encode(draw(timeline)))
    except OSError as error:
        raise ConfigError(f"--png {path}: {(error.strerror or str(error)).lower()}") from error


def draw(timeline: Timeline) -> Pixels:
    """`[HEIGHT, WIDTH, 3]`."""
    canvas = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    canvas[:] = palette.rgb(palette.LIGHT["page"])
    width = WIDTH - LEFT - RIGHT
    columns = _columns(timeline.frames, width)
    image = arena(timeline, MAP)[:, columns]
    _draw_jumps(image, timeline, columns)
    canvas[TOP : TOP + MAP, LEFT : LEFT + width] = image
    _draw_moves(canvas[TOP + MAP + 8 : TOP + MAP + 8 + MOVES, LEFT : LEFT + width], timeline, columns)
    _draw_labels(canvas, timeline, width)
    return canvas


def arena(timeline: Timeline, rows: int) -> Pixels:
    """`[rows, frames, 3]`: the arena behind each frame, byte 0 at the bottom."""
    pool = timeline.life.pool
    image = np.empty((rows, len(timeline.frames), 3), np.uint8)
    byte = ((np.arange(rows)[::-1] + 0.5) / rows * pool.arena_bytes).astype(np.int64)
    null = byte < pool.null_bytes
    for column, (frame, states) in enumerate(timeline.states()):
        image[:, column] = palette.rgb(palette.LIGHT["free"])
        image[null, column] = palette.rgb(palette.LIGHT["null"])
        for index, name in enumerate(timeline.groups):
            lo, hi = frame.spans[index]
            page = byte // pool.groups[name].spec.page_bytes
            inside = (page >= lo) & (page < hi)
            image[inside, column] = _shades(timeline, index, states[index], page[inside])
    return image


def _shades(timeline: Timeline, index: int, state: Int32, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The colours of a region's pages: its own where they are live, the holes' where not, between in a mixed cell."""
    per = timeline.per_cell[timeline.groups[index]]
    share = (state[0, pages // per] / per)[:, None].clip(0, 1)
    live = np.array(palette.rgb(palette.GROUPS[index % len(palette.GROUPS)]))
    hole = np.array(palette.rgb(palette.LIGHT["hole"]))
    return np.asarray(live * share + hole * (1 - share)).astype(np.uint8)


def _columns(frames: list[Frame], width: int) -> NDArray[np.int64]:
    """Which frame each pixel shows: the newest that had come by that step."""
    steps = np.array([frame.step for frame in frames])
    at = steps[0] + (np.arange(width) + 0.5) / width * max(1, steps[-1] - steps[0])
    found: NDArray[np.int64] = np.searchsorted(steps, at, side="right") - 1
    return found.clip(0, len(frames) - 1)


def _draw_jumps(image: Pixels, timeline: Timeline, columns: NDArray[np.int64]) -> None:
    """A line from where pages were to where they went, in the pixel in which that shows first; none if they are many:
    the bars below tell of those."""
    if sum(len(frame.jumps) for frame in timeline.frames) > MANY:
        return
    pool = timeline.life.pool
    shown, first = np.unique(columns, return_index=True)
    for frame, x in zip(shown.tolist(), first.tolist(), strict=True):
        for group, *pages, n in timeline.frames[frame].jumps.tolist():
            size = pool.groups[timeline.groups[group]].spec.page_bytes
            ends = sorted(
                len(image) - 1 - (2 * page + n) * size * len(image) // (2 * pool.arena_bytes) for page in pages
            )
            image[max(0, ends[0]) : ends[1] + 1, x] = palette.rgb(palette.LIGHT["move"])


def _draw_moves(canvas: Pixels, timeline: Timeline, columns: NDArray[np.int64]) -> None:
    """Bars of moved bytes, stacked by group, and a tick where demands were refused."""
    canvas[:] = palette.rgb(palette.LIGHT["free"])
    sizes = [timeline.life.pool.groups[name].spec.page_bytes for name in timeline.groups]
    moved = np.array([[n * size for n, size in zip(f.moved, sizes, strict=True)] for f in timeline.frames])
    most = max(1, int(moved.sum(axis=1).max()))
    tops = np.cumsum(moved, axis=1) * (MOVES - 8) // most
    height = np.arange(MOVES)[::-1, None]
    below = np.zeros(len(columns), np.int64)
    for index in range(len(timeline.groups)):
        top = tops[columns, index]
        canvas[(height >= below) & (height < top)] = palette.rgb(palette.GROUPS[index % len(palette.GROUPS)])
        below = top
    refused = np.array([frame.refusals for frame in timeline.frames])[columns] > 0
    canvas[:6, refused] = palette.rgb(palette.LIGHT["refusal"])


def _draw_labels(canvas: Pixels, timeline: Timeline, width: int) -> None:
    frames, pool = timeline.frames, timeline.life.pool
    at = LEFT
    for name, colour in _legend(timeline):
        canvas[24:38, at : at + 14] = palette.rgb(colour)
        at += 20 + _text(canvas, at + 20, 24, name) + 18
    for i in range(5):
        label = _bytes(pool.arena_bytes * i // 4, pool.arena_bytes)
        y = TOP + MAP - MAP * i // 4
        _text(canvas, LEFT - 12 - 12 * len(label), min(max(y - 7, TOP), TOP + MAP - 14), label)
        canvas[min(y, TOP + MAP - 1), LEFT - 6 : LEFT] = palette.rgb(palette.LIGHT["quiet"])
    _text(canvas, 8, TOP + MAP + 8, "MOVED")
    _text(canvas, 8, TOP + MAP + 26, "REFUSED", "refusal")
    y = TOP + MAP + 8 + MOVES + 10
    for i in range(5):
        step = frames[0].step + (frames[-1].step - frames[0].step) * i // 4
        label = f"{step:,}"
        x = LEFT + width * i // 4
        _text(canvas, min(max(x - 6 * len(label), LEFT), LEFT + width - 12 * len(label)), y, label)
    seconds = frames[-1].seconds - frames[0].seconds
    moved = sum(pool.moved_pages[name] * pool.groups[name].spec.page_bytes for name in timeline.groups)
    _text(
        canvas, LEFT, y + 24, f"STEP ({seconds:,.1f} S IN ALL), {_bytes(moved, moved)} MOVED SINCE THE START", "quiet"
    )


def _legend(timeline: Timeline) -> list[tuple[str, str]]:
    groups = [(name, palette.GROUPS[i % len(palette.GROUPS)]) for i, name in enumerate(timeline.groups)]
    return [*groups, *((name, palette.LIGHT[name]) for name in ("hole", "free", "null"))]


def _text(canvas: Pixels, x: int, y: int, text: str, colour: str = "text") -> int:
    """Write it from there; how wide it is. What does not fit the picture is cut off."""
    dots = letters.draw(text, 2)
    place = canvas[y : y + dots.shape[0], x : x + dots.shape[1]]
    place[dots[: place.shape[0], : place.shape[1]]] = palette.rgb(palette.LIGHT[colour])
    return int(dots.shape[1])


def _bytes(n: int, like: int) -> str:
    """In the unit that suits `like`."""
    size, unit = next((size, unit) for size, unit in _UNITS if like >= size or size == 1)
    return f"{n / size:.1f}".removesuffix(".0") + f" {unit}"
