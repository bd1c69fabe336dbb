"""What `isthmus top` draws, with rich: one screen that is drawn again, or plain text where there is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from isthmus.top_parts import parts_of, strip
from isthmus.top_stream import Frame

_COLORS = ("dodger_blue1", "dark_orange", "green3", "medium_purple1", "hot_pink", "dark_cyan")
_GLYPHS = {"live": "█", "cached": "▒", "hole": "░", "gap": "·", "null": "0", "tail": "-"}
_STATES = {"ready": "serving", "starting": "engine starting", "restarting": "engine restarting", "draining": "stopping"}
_PIPED_WIDTH = 100
_CHROME = 21  # lines of a screen besides requests and groups


class Screen:
    """Draws frames. As a context it takes the terminal's whole screen and gives it back."""

    def __init__(self, out: TextIO, *, live: bool) -> None:
        piped = not out.isatty()
        self._console = Console(file=out, width=_PIPED_WIDTH if piped else None, highlight=False)
        wants_screen = live and not piped
        self._live = Live(console=self._console, screen=True, auto_refresh=False) if wants_screen else None
        self._newest: Frame | None = None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, before: Frame | None, news: Frame | str) -> None:
        """A frame and, for rates, the one before it; or why there is none."""
        if isinstance(news, str):
            drawn: RenderableType = Text(news, style="red")
        else:
            room = max(3, self._console.height - _CHROME) if self._live is not None else len(news["served"])
            drawn = Group(*_draw(before, news, self._console.width, room))
        if self._live is not None:
            self._live.update(drawn, refresh=True)
        else:
            self._console.print(drawn)
            self._console.file.flush()


def _draw(before: Frame | None, frame: Frame, width: int, room: int) -> list[RenderableType]:
    model = frame["model"]["id"] if frame["model"] else "no model yet"
    state = str(frame["state"])
    head = Text.assemble((f"{model} ", "bold"), (_STATES.get(state, state), "green" if state == "ready" else "yellow"))
    if frame["restarts"]:
        head.append(f", restarted {frame['restarts']} ×")
    if frame["pool"] is None:
        return [head]
    return [head, Text(), _arena(frame, width), Text(), _groups(frame), Text(), *_counters(before, frame), Text(),
            _requests(frame, room)]  # fmt: skip


def _arena(frame: Frame, width: int) -> RenderableType:
    line = Text("[", no_wrap=True)
    for state, group in strip(parts_of(frame), width - 2):
        line.append(_GLYPHS[state], "bright_black" if group is None else _color(group))
    line.append("]")
    legend = Text("  ".join(f"{glyph} {state}" for state, glyph in _GLYPHS.items()), "bright_black")
    return Group(line, legend)


def _groups(frame: Frame) -> Table:
    pool = frame["pool"]
    table = _table("bytes", "live", "cached", "holes", "all", "a page", numbers=range(1, 6))
    total = 0
    for index, group in enumerate(pool["groups"]):
        cells = [group["bytes"][state] for state in ("live", "cached", "hole")]
        total += sum(cells)
        name = Text(group["name"], _color(index))
        table.add_row(name, *(f"{n:,}" for n in (*cells, sum(cells), group["page_bytes"])))
    for rest in ("gap", "null", "tail"):
        total += pool[f"{rest}_bytes"]
        table.add_row(rest, "", "", "", f"{pool[f'{rest}_bytes']:,}", "")
    assert total == pool["arena_bytes"], "the parts of the arena do not sum to it"
    table.add_row(Text("arena", "bold"), "", "", "", Text(f"{total:,}", "bold"), "")
    return table


def _counters(before: Frame | None, frame: Frame) -> list[Text]:
    pool, totals = frame["pool"], frame["totals"]
    asked, hits = totals["prefix_cache_queries"], totals["prefix_cache_hits"]
    share = f"{hits / asked:.0%}" if asked else "-"
    moved = sum(group["moved_bytes"] for group in pool["groups"])
    turned_away = sum(frame["refused"].values())
    return [
        Text(
            f"running {pool['running']:,}   waiting {pool['waiting']:,}   steps {pool['steps']:,}   "
            f"prefix hits {share} of {asked:,.0f} tokens"
        ),
        Text(f"generated {_rate(before, frame, 'generation_tokens')}   prompt {_rate(before, frame, 'prompt_tokens')}"),
        Text(
            f"moved {moved:,} B   preemptions {pool['preemptions']:,}   plans refused {pool['refusals']:,}   "
            f"requests refused {turned_away:,}"
        ),
    ]


def _rate(before: Frame | None, frame: Frame, name: str) -> str:
    total = frame["totals"][name]
    if before is None or frame["time"] <= before["time"] or total < before["totals"][name]:
        return f"{total:,.0f} tokens"
    rate = (total - before["totals"][name]) / (frame["time"] - before["time"])
    return f"{total:,.0f} tokens ({rate:,.1f} a second)"


def _requests(frame: Frame, room: int) -> RenderableType:
    if not frame["served"]:
        return Text("nothing runs", "bright_black")
    table = _table("request", "state", "prompt", "cached", "output", "waited", "for", "cut by", numbers=range(2, 6))
    for request in frame["served"][:room]:
        reasons = sorted(request["waited_for"], key=lambda reason: -request["waited_for"][reason])
        table.add_row(
            _short(request["request_id"], request["index"]),
            request["state"],
            f"{request['prompt_tokens']:,}",
            f"{request['cached_tokens']:,}",
            f"{request['output_tokens']:,} of {request['limit']:,}",
            f"{request['waited_seconds']:.1f} s",
            ", ".join(reasons),
            request["cut_by"] or "-",
        )
    more = frame["left_out"] + max(0, len(frame["served"]) - room)
    return Group(table, Text(f"and {more:,} more")) if more else table


def _table(*columns: str, numbers: range) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in numbers else "left", no_wrap=True)
    return table


def _short(request_id: str, index: int) -> str:
    """The end of an id, which is random, and which continuation it is."""
    return request_id[-8:] + (f"/{index}" if index else "")


def _color(group: int) -> str:
    return _COLORS[group % len(_COLORS)]
