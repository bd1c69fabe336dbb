"""What a fuzzed run is fixed by, besides its events: groups, arena, limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.memory.group import Kind, null_bytes
from isthmus.memory.spec import ALIGN

_PAGE_SIZES = (1, 1, 2, 2, 3, 4, 4, 5, 8, 8, 16, 27, 64)
_COLUMNS = (1, 3, 4, 5, 6, 8, 10, 14, 20, 30)  # pages of the longest sequence
_LONGEST = 110
_ROOM = (0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class World:
    """A model's shape, an arena, and a scheduler's settings."""

    groups: tuple[Group, ...]
    arena_bytes: int
    walls: Mapping[str, int] | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cached_tokens: int | None
    prefix_caching: bool
    overlap: bool  # steps are launched one ahead of their results
    vocab: int
    eos: tuple[int, ...]

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's settings."""
        return SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def longest(self) -> int:
        """Tokens of one sequence alone that can be cached; 0 if not even one fits."""
        pool = Pool(self.arena_bytes, self.groups, walls=self.walls)
        return capacity.longest(pool, self.max_model_len, self.max_cached_tokens)

    def lines(self) -> list[str]:
        """For people."""
        walls = "" if self.walls is None else f", walls {dict(self.walls)}"
        cap = "" if self.max_cached_tokens is None else f", at most {self.max_cached_tokens} tokens cached"
        return [
            *(f"group {_describe(group)}" for group in self.groups),
            f"arena of {self.arena_bytes} bytes{walls}; max_model_len {self.max_model_len}{cap}",
            f"max_num_seqs {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}, "
            f"prefix caching {'on' if self.prefix_caching else 'off'}, "
            f"steps {'overlap by one' if self.overlap else 'do not overlap'}",
            f"{self.vocab} tokens, of which {list(self.eos) or 'none'} end a sequence",
        ]


def draw_world(rng: Random) -> World:
    """Any world in which at least half of its longest sequence fits."""
    page_size = rng.choice(_PAGE_SIZES)
    length = min(_LONGEST, 3 + rng.choice(_COLUMNS) * page_size + rng.randrange(page_size))
    groups = _draw_groups(rng, page_size, length)
    seqs = rng.choice((1, 2, 3, 4, 4, 6, 8))
    cap = length + rng.randrange(3 * length + 2 * page_size) if rng.random() < 0.2 else None
    room, slack, walled = rng.choice(_ROOM), rng.randrange(max(g.spec.page_bytes for g in groups)), rng.random() < 0.2
    budget = max(seqs, rng.choice((1, 3, 8, 17, 32, 64, 200)))
    caching, overlap = rng.random() < 0.8, rng.random() < 0.5
    vocab, eos = rng.choice((5, 11, 31, 997)), rng.choice(((), (1,), (1, 3)))
    while True:
        arena, walls = _size(groups, length, room, slack, walled)
        world = World(groups, arena, walls, length + 1, seqs, budget, cap, caching, overlap, vocab, eos)
        if world.longest >= (length + 1) // 2:
            return world
        room, cap = room * 1.3, None if cap is None else cap + page_size


def _draw_groups(rng: Random, page_size: int, length: int) -> tuple[Group, ...]:
    kinds: list[Kind] = ["append"] * rng.choice((0, 1, 1, 1, 1, 2))
    kinds += ["window"] * rng.choice((0, 0, 1, 1, 2, 3))
    kinds += ["state"] * rng.choice((0, 0, 1, 1, 2))
    groups = []
    kinds = kinds or ["state"]
    for i, kind in enumerate(kinds):
        widths = (
            rng.randint(1, 2),
            rng.randint(2, 3 * page_size + 2),
            rng.randint(2, length),
            rng.randint(2, 2 * length),
        )
        window = rng.choice(widths) if kind == "window" else None
        unit = _between(rng, 8, 800)  # bytes of a token
        size = 1 if kind == "state" else page_size
        page_bytes = _between(rng, 16, 6400) if kind == "state" else page_size * unit
        page_bytes = max(-(-page_bytes // ALIGN) * ALIGN, -(-8 * size // ALIGN) * ALIGN)
        groups.append(Group(f"{kind}{i}", opaque_spec(page_bytes, size), kind, window))
    return tuple(groups)


def _between(rng: Random, low: int, high: int) -> int:
    """Any order of magnitude is as likely as another."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _size(
    groups: Sequence[Group], length: int, room: float, slack: int, walled: bool
) -> tuple[int, Mapping[str, int] | None]:
    """Bytes of an arena with room for so many of the longest sequence, and its walls."""
    null = null_bytes(groups)
    if not walled:
        return null + int(room * capacity.peak_bytes({g.name: g for g in groups}, length)) + slack, None
    peaks = capacity.peaks(groups, length)
    walls = {g.name: int((1 + room * max(peak[g.name] for peak in peaks)) * g.spec.page_bytes) for g in groups}
    return null + sum(walls.values()) + slack, walls


def _describe(group: Group) -> str:
    tokens = f"{group.spec.page_size} tokens a page, " if group.space == "tokens" else ""
    window = "" if group.window is None else f"window {group.window}, "
    return f"{group.name}: {window}{tokens}{group.spec.page_bytes} bytes a page"
