"""What the device did, held against the shadow: its tables, and whether results are numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.engine.sanitizer.finding import Finding, Place
from isthmus.engine.sanitizer.shadow import Pages, Shadow
from isthmus.engine.sanitizer.stays import Stay
from isthmus.engine.step import Executor

Tables = tuple[Mapping[str, NDArray[np.integer]], NDArray[np.integer]]
"""`({group: [ids + 1] physical pages}, [rows, columns] virtual ids)`."""


class Open(Executor, Protocol):
    """An executor that can be looked into."""

    @property
    def arena(self) -> Any:
        """The bytes of all pages, as a torch tensor."""
        ...

    def tables(self) -> Tables:
        """Page tables and block table as the device uses them, after all that was launched. Waits for the device."""
        ...


def compare(shadow: Shadow, tables: Tables) -> list[Finding]:
    """The device's tables against what it was told."""
    translations, blocks = tables
    found = []
    for pages in shadow.pages.values():
        found += _compare_pages(shadow, pages, translations[pages.group.name])
    if "tokens" in shadow.ids:
        found += _compare_blocks(shadow, blocks)
    return found


def spoiled(shadow: Shadow, stay: Stay, past: int, arena: Any) -> Finding:
    """A sequence's results are no numbers, when it had `past` tokens cached: in which page does that begin?

    The pages that it read are searched for a token that is no number. If there is none, what it read lies past its end.
    """
    from isthmus.engine.sanitizer.numbers import layers_with_nan  # noqa: PLC0415 (torch: core needs none)

    last: list[Place] = []
    for pages in shadow.pages.values():
        virtual, stop = _cached(shadow, pages, stay, past)
        page = pages.table[virtual].astype(np.int64)
        layers = layers_with_nan(arena, pages.group, page[page > 0], stop[page > 0])
        for place, layer in zip(page[page > 0].tolist(), layers, strict=True):
            if layer is not None:
                what = f"{stay.label} reads page {place}, where layer {layer} holds what is no number"
                where = pages.place(place, int(pages.named[place]))
                return Finding("nan", what, (where,), frozenset([stay.number]))
        if len(page):
            last.append(pages.place(int(page[-1]), int(virtual[-1])))
    what = f"{stay.label} had {past} tokens cached, all of them numbers: it read past its end, or the model made it"
    return Finding("nan", what, tuple(last), frozenset([stay.number]))


def _cached(shadow: Shadow, pages: Pages, stay: Stay, past: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Ids of a sequence in a group, and how many tokens of each are cached; the page at its end is the last one."""
    if pages.group.kind == "state":
        return shadow.states[[stay.row]], np.array([1])
    size, window = shadow.page_size, pages.group.window
    first = 0 if window is None else max(past - window + 1, 0) // size
    column = np.arange(first, past // size + 1)
    return shadow.blocks[stay.row, column], np.clip(past - column * size, 0, size)


def _compare_pages(shadow: Shadow, pages: Pages, device: NDArray[np.integer]) -> list[Finding]:
    told = pages.table
    there = np.full(len(told), -1, np.int64)
    there[: min(len(told), len(device))] = device[: len(told)]
    bad = np.flatnonzero((told > 0) & (there != told))
    found = []
    for virtual in bad.tolist():
        page = int(there[virtual])
        users = shadow.users(pages.group.space, [virtual])
        if not users:  # nobody has used it, so nothing has been harmed
            continue
        entry = "has no entry" if page < 0 else f"has page {page}"
        what = f"the table of {pages.group.name} on the device {entry} for id {virtual}, which has page {told[virtual]}"
        hit = shadow.under(pages.group.name, page) if page > 0 else []
        places = (pages.place(int(told[virtual]), virtual), *hit)
        found.append(Finding("table", what, places, users, harmed=True))
    return _merge(found)


def _compare_blocks(shadow: Shadow, device: NDArray[np.integer]) -> list[Finding]:
    found = []
    for stay in shadow.stays.served.values():
        told = shadow.blocks[stay.row, : -(-stay.past // shadow.page_size)]
        there = device[stay.row, : len(told)]
        bad = np.flatnonzero((told > 0) & (told != there))
        if not len(bad):
            continue
        column = int(bad[0])
        what = f"the block table on the device has id {there[column]} in row {stay.row}, column {column} of "
        what += f"{stay.label}, which has id {told[column]}"
        places = [
            pages.place(int(pages.table[virtual]), int(virtual))
            for pages in shadow.pages.values()
            if pages.group.space == "tokens"
            for virtual in (told[column], there[column])
        ]
        found.append(Finding("table", what, tuple(p for p in places if p.page), frozenset([stay.number]), harmed=True))
    return found


def _merge(found: Sequence[Finding]) -> list[Finding]:
    """One finding for all wrong entries of the same sequences."""
    merged: dict[frozenset[int], Finding] = {}
    for one in found:
        first = merged.get(one.stays)
        places = one.places if first is None else (*first.places, *one.places)
        merged[one.stays] = Finding(one.kind, one.what if first is None else first.what, places, one.stays, one.harmed)
    return list(merged.values())
