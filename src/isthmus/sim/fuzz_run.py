"""A run that was drawn from a seed, or told by a script, and what came of it. The same one again is the same, bit for
bit."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from isthmus.sim.fuzz_draw import Draw
from isthmus.sim.fuzz_events import Event
from isthmus.sim.fuzz_life import Life
from isthmus.sim.fuzz_world import World, draw_world


@dataclass(frozen=True)
class Failure:
    """What was found wrong."""

    kind: str  # which check, of which file: two failures of one kind are taken for one
    message: str


@dataclass(frozen=True)
class Run:
    """A world and what happened in it, up to what was found wrong if something was."""

    world: World
    events: tuple[Event, ...]
    failure: Failure | None
    seen: Counter[str]  # what it went through; empty if it failed
    digest: str  # of all steps
    turns: int  # how many were planned

    def lines(self) -> list[str]:
        """The world, and the events as a script."""
        return [*self.world.lines(), *(f"{i:>3}  {event}" for i, event in enumerate(self.events, 1)), "     to the end"]


def explore(seed: int) -> Run:
    """The run of a seed."""
    rng = Random(seed)
    world = draw_world(rng)
    return _play(Life(world), lambda life: Draw(rng, life).events())


def replay(world: World, events: Iterable[Event], most_turns: int | None = None) -> Run:
    """The run of a script. One that goes on for too long fails, as no run does for any other reason."""
    return _play(Life(world, most_turns), lambda _: events)


def _play(life: Life, events_of: Callable[[Life], Iterable[Event]]) -> Run:
    done: list[Event] = []
    failure = None
    try:
        for event in events_of(life):
            done.append(event)
            life.do(event)
        life.finish()
    except Exception as error:  # whatever it is, it is a finding
        failure = _failure(error)
    seen = Counter() if failure is not None else life.seen
    return Run(life.world, tuple(done), failure, seen, life.digest.hexdigest(), life.turns)


def _failure(error: Exception) -> Failure:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    kind = f"{type(error).__name__} in {Path(frame.filename).stem}.{frame.name}"
    return Failure(kind, str(error) or f"line {frame.lineno}: {frame.line}")
