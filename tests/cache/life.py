"""Sequences living on a pool and a prefix cache as a scheduler runs them, on a device that remembers what it holds.

Every page of the device holds what its bytes stand for: the salt and all tokens up to the page's end (a query's
keys depend on everything before them). Before each chunk the sequence reads, page by page, what its kinds say its
first query sees; a page restored at the wrong place, moved wrongly or evicted too early holds something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.cache import CacheKind, kind_of
from isthmus.cache.names import Names
from isthmus.cache.prefix import Match, PrefixCache
from isthmus.cache.window import Window
from isthmus.memory import Copies, Delta, Frees, Group, Moves, Pool, Writes, opaque_spec

Content: TypeAlias = tuple[str | None, tuple[int, ...]]

LARGE = 4000  # cells of an arena in which nothing is ever evicted

SHAPES: dict[str, dict[str, tuple[int, int | None]]] = {  # group: (bytes of a page / 16, window)
    "append": {"full": (2, None)},
    "window + append": {"full": (1, None), "window": (3, 7)},
    "two windows + append": {"full": (2, None), "near": (1, 3), "far": (3, 10)},
    "two appends": {"full": (2, None), "full too": (1, None)},
    "state + append": {"full": (1, None), "state": (7, None)},
    "state + window + append": {"full": (2, None), "window": (1, 6), "state": (5, None), "state too": (2, None)},
    "windows": {"near": (2, 4), "far": (1, 11)},
    "narrow window": {"window": (1, 2)},
    "state + window": {"window": (1, 8), "state": (6, None)},
    "state + window of one": {"window": (1, 1), "state": (6, None)},
    "state": {"state": (3, None)},
}


def groups_of(shape: str, page_size: int) -> list[Group]:
    """The groups of a shape; the kind follows from the name."""
    found = []
    for name, (units, window) in SHAPES[shape].items():
        kind = "state" if name.startswith("state") else "append" if window is None else "window"
        spec = opaque_spec(units * 16, 1 if kind == "state" else page_size)
        found.append(Group(name, spec, kind, window))  # type: ignore[arg-type]
    return found


class Device:
    """Applies deltas, and knows what each physical page holds."""

    def __init__(self, pool: Pool) -> None:
        self.tables = {name: np.zeros(len(pool.table(name)), np.int64) for name in pool.groups}
        self.holds: dict[str, dict[int, Content]] = {name: {} for name in pool.groups}

    def apply(self, delta: Delta) -> None:
        for op in delta.ops:
            holds = self.holds[op.group]
            if isinstance(op, Writes):
                self.tables[op.group][op.virtual] = op.physical
            elif isinstance(op, Frees):
                for page in op.page.tolist():
                    holds.pop(page, None)
            else:
                found = [(to, holds[at]) for at, to in _pairs(op) if at in holds]
                for at, to in _pairs(op):
                    holds.pop(to, None)
                    if isinstance(op, Moves):
                        holds.pop(at, None)
                holds.update(found)

    def write(self, group: str, virtual: int, content: Content) -> None:
        page = int(self.tables[group][virtual])
        assert page, f"{group}: id {virtual} has no page to write to"
        self.holds[group][page] = content

    def read(self, group: str, virtual: int) -> Content | None:
        return self.holds[group].get(int(self.tables[group][virtual]))


@dataclass(eq=False)
class Row:
    """A running sequence."""

    salt: str | None
    tokens: list[int]
    names: Names
    past: int = 0
    known: int = 0  # columns that the cache has been given
    ids: list[int] = field(default_factory=list)  # per column
    state: int = 0
    copy_from: Match | None = None  # whose snapshot the first step copies
    passed: dict[str, int] = field(default_factory=dict)  # per window group


class Life:
    """A pool, its cache, and the sequences that run. Everything is checked after every operation."""

    def __init__(self, shape: str, page_size: int, cells: int) -> None:
        self.pool = Pool(cells * 16, groups_of(shape, page_size))
        self.cache = PrefixCache(self.pool, page_size)
        self.device = Device(self.pool)
        self.page_size = page_size
        self.rows: list[Row] = []
        self.kinds: dict[str, CacheKind] = {}
        for name, group in self.pool.groups.items():
            window = group.kind == "window"
            self.kinds[name] = Window.of(group, keep_boundary=True) if window else kind_of(group)
        self.tokens = [name for name, kind in self.kinds.items() if kind.space == "tokens"]
        self.states = self.pool.covering.get("states", ())
        self.cover = self.pool.covering["tokens"][0] if self.tokens else ""
        self.windows = [name for name in self.tokens if self.pool.groups[name].kind == "window"]
        self.windows.sort(key=lambda name: name == self.cover)

    # -- what a scheduler does ------------------------------------------------------------------------------

    def lookup(self, tokens: Sequence[int], salt: str | None = None) -> Match:
        names = self.cache.names(salt)
        names.extend(tokens)
        return self.cache.match(names, len(tokens))

    def start(self, tokens: Sequence[int], salt: str | None = None) -> Row:
        """Admit a sequence with whatever of it is cached."""
        names = self.cache.names(salt)
        names.extend(tokens)
        match = self.cache.match(names, len(tokens))
        row = Row(salt, list(tokens), names, match.columns * self.page_size, match.columns)
        row.ids = self.cache.acquire(match).tolist()
        row.passed = {name: match.starts[name] for name in self.windows}
        row.copy_from = match if match.snapshot else None
        self.rows.append(row)
        self.check()
        return row

    def step(self, row: Row, n: int) -> bool:
        """Compute the next n tokens of a sequence. False if the pool has no room even after evicting."""
        return self.step_together([row], n)

    def step_together(self, rows: Sequence[Row], n: int) -> bool:
        """The same for several sequences, whose new pages become the cache's in one call."""
        ran = [row for row in rows if self._run(row, n)]
        self._settle(ran)
        return len(ran) == len(rows)

    def _run(self, row: Row, n: int) -> bool:
        past, new = np.array([row.past]), np.array([n])
        demand = {}
        for name, kind in self.kinds.items():
            low, high = kind.extend(past, new)
            demand[name] = int(high[0] - low[0])
        for name in self.states:
            demand[name] = int(row.state == 0)
        if not self.cache.evict(demand):
            return False
        plan = self.pool.plan(demand)
        assert plan, "evict said there is room"
        binds: dict[str, NDArray[np.int64]] = {}
        if self.tokens:
            low, high = self.kinds[self.cover].extend(past, new)
            have = len(row.ids)
            row.ids += [0] * (int(high[0]) - have)
            row.ids[int(low[0]) :] = np.asarray(plan.ids["tokens"]).tolist()  # type: ignore[union-attr]
            for name in self.tokens:
                low, high = self.kinds[name].extend(past, new)
                binds[name] = np.array(row.ids[int(low[0]) : int(high[0])], np.int64)
        if self.states and not row.state:
            row.state = int(np.asarray(plan.ids["states"])[0])  # type: ignore[union-attr]
        self.pool.commit(plan, binds)
        if row.copy_from is not None:
            for name in self.states:
                self.pool.copy(name, [row.copy_from.snapshot], [row.state])
            self.cache.unlock(self.states[0], np.array([row.copy_from.snapshot]))
            row.copy_from = None
        self.device.apply(self.pool.take_delta())
        self._compute(row, n)
        self.check()
        return True

    def keep(self, row: Row) -> None:
        """Somebody may come back to where the sequence is; with a snapshot if it is a boundary and there is room."""
        columns, snapshot = row.past // self.page_size, 0
        here = row.past % self.page_size == 0 and row.past > 0
        if self.states and here and self.cache.lacks_snapshot(row.names, columns):
            plan = self.pool.plan(dict.fromkeys(self.states, 1))
            if plan:
                snapshot = int(np.asarray(plan.ids["states"])[0])  # type: ignore[union-attr]
                self.pool.commit(plan)
                for name in self.states:
                    self.pool.copy(name, [row.state], [snapshot])
        self.cache.keep(row.names, columns, snapshot)
        self.check()

    def end(self, row: Row) -> None:
        """The sequence finishes, is aborted or preempted."""
        self.rows.remove(row)
        for name in self.windows:
            if name != self.cover:
                held = np.array(row.ids[row.passed[name] :], np.int64)
                self.cache.unlock(name, held[held > 0])
        if self.tokens:
            ids = np.array(row.ids, np.int64)
            ids = ids[ids > 0]
            self.pool.release("tokens", ids[self.cache.unlock(self.cover, ids)])
        if row.copy_from is not None:
            self.cache.unlock(self.states[0], np.array([row.copy_from.snapshot]))
        if row.state:
            self.pool.release("states", [row.state])
        self.check()

    def serve(self, tokens: Sequence[int], salt: str | None = None, chunks: Sequence[int] = ()) -> Match:
        """One whole request: cut at the chunks given, at the branch and at the prompt's last boundary."""
        match = self.lookup(tokens, salt)
        row = self.start(tokens, salt)
        cuts = {c for c in (*chunks, match.branch * self.page_size, self.last(tokens)) if row.past < c < len(tokens)}
        for cut in (*sorted(cuts), len(tokens)):
            assert self.step(row, cut - row.past)
            self.keep(row)
        self.end(row)
        return match

    def last(self, tokens: Sequence[int]) -> int:
        """The last boundary that a second request with these tokens could start from."""
        return (len(tokens) - 1) // self.page_size * self.page_size

    # -- what must be true ----------------------------------------------------------------------------------

    def private(self) -> dict[str, NDArray[np.int64]]:
        """Ids that sequences own, by their rows' account."""
        shared = set(self.cache.ids("tokens").tolist()) if self.tokens else set()
        mine = {v for row in self.rows for v in row.ids if v and v not in shared}
        found = {"tokens": np.array(sorted(mine), np.int64)} if self.tokens else {}
        if self.states:
            found["states"] = np.array([row.state for row in self.rows if row.state], np.int64)
        return found

    def check(self) -> None:
        self.device.apply(self.pool.take_delta())
        self.pool.check()
        self.cache.check(self.private())
        for name in self.pool.groups:
            assert np.array_equal(self.device.tables[name], self.pool.table(name).entries)

    def restorable(self, tokens: Sequence[int], salt: str | None, group: str, columns: int) -> bool:
        """Brute force: does the cache hold what a query at this boundary sees in this group?"""
        space = self.pool.groups[group].space
        there = {self.device.read(group, v) for v in self.cache.ids(space).tolist()}
        if space == "states":
            return columns == 0 or self._content(salt, tokens, columns * self.page_size) in there
        seen = _seen(self.pool.groups[group], columns * self.page_size)
        return all(self._content(salt, tokens, (c + 1) * self.page_size) in there for c in seen)

    def expected(self, tokens: Sequence[int], salt: str | None) -> tuple[int, dict[str, int]]:
        """The longest usable boundary in columns, and per group in tokens, by asking every boundary of every kind."""
        every = range((len(tokens) - 1) // self.page_size + 1)
        good = {name: {b for b in every if self.restorable(tokens, salt, name, b)} for name in self.pool.groups}
        return max(set.intersection(*good.values())), {name: max(b) * self.page_size for name, b in good.items()}

    # -- inside ---------------------------------------------------------------------------------------------

    def _content(self, salt: str | None, tokens: Sequence[int], end: int) -> Content:
        return salt, tuple(tokens[:end])

    def _compute(self, row: Row, n: int) -> None:
        past, end = row.past, row.past + n
        for name in self.tokens:
            for c in _seen(self.pool.groups[name], past):
                want = self._content(row.salt, row.tokens, min(past, (c + 1) * self.page_size))
                assert self.device.read(name, row.ids[c]) == want, f"{name}: column {c} at {past} tokens"
            for c in range(past // self.page_size, -(-end // self.page_size)):
                if row.ids[c] and self.pool.is_bound(name, [row.ids[c]])[0]:
                    content = self._content(row.salt, row.tokens, min(end, (c + 1) * self.page_size))
                    self.device.write(name, row.ids[c], content)
        for name in self.states:
            if past:
                assert self.device.read(name, row.state) == self._content(row.salt, row.tokens, past), name
            self.device.write(name, row.state, self._content(row.salt, row.tokens, end))
        row.past = end

    def _settle(self, rows: Sequence[Row]) -> None:
        first, end, own = [], [], []
        for row in rows:
            row.names.extend(row.tokens[row.names.tokens :])
            known, row.known = row.known, row.past // self.page_size
            first.append(known)
            end.append(row.known)
            own += row.ids[known : row.known] if self.tokens else [0] * (row.known - known)
        columns = np.array(first, np.int64), np.array(end, np.int64)
        ids = self.cache.insert([row.names for row in rows], *columns, np.array(own, np.int64)).tolist()
        for row, start, stop in zip(rows, first, end, strict=True):
            if self.tokens:
                row.ids[start:stop] = ids[: stop - start]
            ids = ids[stop - start :]
        self.check()
        for row in rows:
            self._pass(row)
        self.check()

    def _pass(self, row: Row) -> None:
        past = np.array([row.past])
        for name in self.windows:
            end = min(int(self.kinds[name].dead(past)[0]), len(row.ids))
            start, row.passed[name] = row.passed[name], max(row.passed[name], end)
            ids = np.array(row.ids[start:end], np.int64)
            ids = ids[ids > 0]
            private = ids[self.cache.unlock(name, ids)]
            if name == self.cover:
                row.ids[start:end] = [0] * len(row.ids[start:end])
                self.pool.release("tokens", private)
            else:
                self.pool.unbind(name, private[self.pool.is_bound(name, private)])


def _seen(group: Group, query: int) -> range:
    """Columns before it that a query at this position sees."""
    first = 0 if group.window is None else max(0, query - group.window + 1)
    return range(first // group.spec.page_size, -(-query // group.spec.page_size)) if query > first else range(0)


def _pairs(op: Moves | Copies) -> list[tuple[int, int]]:
    return list(zip(op.source.tolist(), op.destination.tolist(), strict=True))


def total(pages: Mapping[str, int], pool: Pool) -> int:
    """Bytes of pages per group."""
    return sum(n * pool.groups[name].spec.page_bytes for name, n in pages.items())


def prompt(*words: int, tail: int = 0) -> list[int]:
    """Tokens in pieces of 12, so that prompts share prefixes of whole pieces, and `tail` tokens of their own."""
    return [1000 * word + i for word in words for i in range(12)] + [-1 - i for i in range(tail)]


def cells_of(shape: str, page_size: int, length: int) -> int:
    """What a sequence of so many tokens in one chunk needs, with a snapshot, and the null page."""
    groups = groups_of(shape, page_size)
    pages = {g.name: int(kind_of(g).held(np.array([0]), np.array([length]))[0]) + (g.kind == "state") for g in groups}
    return sum(pages[g.name] * g.spec.page_bytes for g in groups) // 16 + max(g.spec.page_bytes for g in groups) // 16
