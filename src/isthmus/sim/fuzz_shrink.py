"""Makes a run that failed small: whatever can be left out or made simpler without another outcome is, greedily.

Events go in runs of halving length (delta debugging, Zeller and Hildebrandt 2002), then each that is left is made
simpler, then the world, until nothing more can be done. Every try is a whole run, so the result fails for sure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from isthmus.memory import opaque_spec
from isthmus.sim.fuzz_events import Add, Compact, Event, Refuse, Turn
from isthmus.sim.fuzz_model import SAYS
from isthmus.sim.fuzz_run import Run, replay
from isthmus.sim.fuzz_world import World


def shrink(run: Run, most_runs: int = 500) -> tuple[Run, int]:
    """A small run with a failure of the same kind, and how many runs it took to find."""
    assert run.failure is not None, "a run that did not fail cannot be shrunk"
    shrinker = _Shrinker(run, most_runs)
    while shrinker.drop_events() | shrinker.simplify_events() | shrinker.simplify_world():
        pass
    return shrinker.best, shrinker.runs


class _Shrinker:
    """Each method says whether it got anywhere."""

    def __init__(self, run: Run, most_runs: int) -> None:
        self.best = run
        self.runs = 0
        self._most = most_runs

    def drop_events(self) -> bool:
        """Leave out whatever can be left out."""
        before = len(self.best.events)
        size = before
        while size:
            start = 0
            while start < len(self.best.events):
                rest = self.best.events[:start] + self.best.events[start + size :]
                if not self._try(self.best.world, rest):
                    start += size
            size //= 2
        return len(self.best.events) < before

    def simplify_events(self) -> bool:
        """Make every event as simple as it can be."""
        found, i = False, 0
        while i < len(self.best.events):
            events = self.best.events
            options = ((*events[:i], simpler, *events[i + 1 :]) for simpler in _simpler_events(events[i]))
            if any(self._try(self.best.world, option) for option in options):
                found = True
            else:
                i += 1
        return found

    def simplify_world(self) -> bool:
        """Make the world as simple as it can be."""
        found = False
        while any(self._try(world, self.best.events) for world in _simpler_worlds(self.best.world)):
            found = True
        return found

    def _try(self, world: World, events: Sequence[Event]) -> bool:
        """Does this fail in the same way? Then it is the best so far."""
        if self.runs >= self._most:
            return False
        self.runs += 1
        assert self.best.failure is not None
        # What takes far longer to fail would be no simpler, and most runs that do not fail at all take far longer.
        run = replay(world, events, 2 * self.best.turns + 5)
        if run.failure is None or run.failure.kind != self.best.failure.kind:
            return False
        self.best = run
        return True


def _simpler_events(event: Event) -> Iterator[Event]:
    if isinstance(event, Turn):
        yield from (Turn(times) for times in sorted({1, event.times // 2, event.times - 1}) if 0 < times < event.times)
    elif isinstance(event, Refuse) and event.times > 1:
        yield Refuse(1)
    elif isinstance(event, Compact) and event.pinned:
        yield Compact()
    elif isinstance(event, Add):
        yield from _simpler_requests(event)


def _simpler_requests(event: Add) -> Iterator[Add]:
    options = (
        Add(event.name, event.pieces, event.max_tokens),
        replace(event, n=1),
        replace(event, n=max(1, event.n - 1)),
        replace(event, seed=None),
        replace(event, min_tokens=0),
        replace(event, stop_token_ids=()),
        replace(event, ignore_eos=False),
        replace(event, salt=None),
        replace(event, penalty=False),
        replace(event, prompt_logprobs=False),
    )
    yield from (option for option in options if option != event)
    most = event.max_tokens
    if most is None:
        yield replace(event, max_tokens=1)
    else:
        fewer = sorted({1, most // 2, most - 1})
        yield from (replace(event, max_tokens=n, min_tokens=min(n, event.min_tokens)) for n in fewer if 0 < n < most)
    for i, (book, n) in enumerate(event.pieces):
        before, after = event.pieces[:i], event.pieces[i + 1 :]
        if before or after:
            yield replace(event, pieces=(*before, *after))
        if book == SAYS:
            yield replace(event, pieces=(*before, (0, n), *after))
        for fewer_of in sorted({1, n // 2, n - 1}):
            if 0 < fewer_of < n:
                yield replace(event, pieces=(*before, (book, fewer_of), *after))


def _simpler_worlds(world: World) -> Iterator[World]:
    yield from (_without(world, i) for i in range(len(world.groups)) if len(world.groups) > 1)
    options = (
        replace(world, prefix_caching=False),
        replace(world, overlap=False),
        replace(world, walls=None),
        replace(world, max_cached_tokens=None),
        replace(world, eos=()),
    )
    yield from (option for option in options if option != world)
    for seqs in sorted({1, 2, world.max_num_seqs - 1}):
        if 0 < seqs < world.max_num_seqs:
            yield replace(world, max_num_seqs=seqs)
    size = max(group.spec.page_size for group in world.groups)
    yield from (_with_pages(world, fewer) for fewer in (1, 2, 4) if fewer < size)
    for i, group in enumerate(world.groups):
        before, after = world.groups[:i], world.groups[i + 1 :]
        small = 16 * -(-group.spec.page_size // 2)
        if group.spec.page_bytes > small:
            spec = opaque_spec(small, group.spec.page_size)
            yield replace(world, groups=(*before, replace(group, spec=spec), *after))
        if group.window is not None and group.window > 1:
            yield replace(world, groups=(*before, replace(group, window=group.window // 2), *after))


def _without(world: World, i: int) -> World:
    groups = world.groups[:i] + world.groups[i + 1 :]
    walls = None if world.walls is None else {group.name: world.walls[group.name] for group in groups}
    return replace(world, groups=groups, walls=walls)


def _with_pages(world: World, size: int) -> World:
    """The same bytes a token, other pages."""
    groups = []
    for group in world.groups:
        old = group.spec
        page_bytes = max(16 * -(-size // 2), -(-old.page_bytes * size // old.page_size // 16) * 16)
        groups.append(replace(group, spec=opaque_spec(page_bytes, size)) if group.space == "tokens" else group)
    return replace(world, groups=tuple(groups))
