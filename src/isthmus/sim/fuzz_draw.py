"""Draws what happens next in a fuzzed run, looking at where it stands: so that events meet every state there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from isthmus.engine.sequence import Sequence, Status
from isthmus.sim.fuzz_events import (
    Abort,
    Add,
    Compact,
    Event,
    Land,
    Plan,
    Preempt,
    Refuse,
    Reset,
    Spoil,
    Stop,
    Turn,
)
from isthmus.sim.fuzz_life import Life
from isthmus.sim.fuzz_model import SAYS, Piece

_OFTEN = {"add": (2, 4, 8), "turn": (3, 4, 6)}
_RARE = ("plan", "land", "abort", "stop", "preempt", "spoil", "reset", "compact", "refuse")


class Draw:
    """One run's traffic. Every run has its own mood: which events are common in it, which never come."""

    def __init__(self, rng: Random, life: Life) -> None:
        self._rng = rng
        self._life = life
        self._page_size = max(group.spec.page_size for group in life.world.groups)
        self._added: list[Add] = []
        self._weights: dict[str, float] = {name: rng.choice(weights) for name, weights in _OFTEN.items()}
        self._weights |= {name: rng.choice((0, 0, 0.3, 1, 2)) for name in _RARE}
        self._salts = rng.choice(((None,), (None,), (None, None, "other")))
        self._plain = rng.random() < 0.3  # no parameters but lengths
        self._shares = rng.choice((0.0, 0.7, 0.8, 0.95))  # of prompts that begin as others do
        self._prompts = rng.choice((0.1, 0.3, 0.6, 1.0))  # of the longest that fits, at most
        self._outputs = rng.choice((0.1, 0.3, 0.6, 1.0))  # of what is left, at most

    def events(self) -> Iterator[Event]:
        """So many as the run has, each drawn when the one before it was done."""
        for _ in range(self._rng.randrange(6, 50)):
            yield self._next()

    def _next(self) -> Event:
        rng, live = self._rng, self._live()
        kind = rng.choices(list(self._weights), list(self._weights.values()))[0]
        if kind in ("abort", "stop", "preempt", "spoil"):
            return self._to(kind, self._pick(live)) if live else self._add()
        if kind == "add":
            most = 50 * self._life.world.max_num_seqs  # so that a run ends some day
            return Turn(4) if sum(s.limit - len(s.output) for s in live) > most else self._add()
        events: dict[str, Event] = {
            "turn": Turn(rng.choice((1, 1, 2, 3, 5, 9))),
            "plan": Plan(),
            "land": Land(),
            "reset": Reset(),
            "compact": Compact(rng.choice((0, 1, 2, 5))),
            "refuse": Refuse(rng.randint(1, 5)),
        }
        return events[kind]

    def _to(self, kind: str, sequence: Sequence) -> Event:
        name, index = sequence.request.request_id, sequence.index
        events: dict[str, Event] = {
            "abort": Abort(name),
            "stop": Stop(name, index),
            "preempt": Preempt(name, index),
            "spoil": Spoil(name, index),
        }
        return events[kind]

    def _live(self) -> list[Sequence]:
        requests = self._life.scheduler.requests.values()
        return [s for request in requests for s in request.sequences if s.status is not Status.FINISHED]

    def _pick(self, live: list[Sequence]) -> Sequence:
        """One of a state that is drawn first, so that rare states are not rare."""
        states = {(s.status, s.has_pending, s.past < len(s.prompt)): None for s in live}
        state = self._rng.choice(list(states))
        return self._rng.choice([s for s in live if (s.status, s.has_pending, s.past < len(s.prompt)) == state])

    def _add(self) -> Add:
        rng, world, name = self._rng, self._life.world, f"r{len(self._added)}"
        pieces = self._prompt()
        prompt = sum(n for _, n in pieces)
        most = max(1, min(self._life.scheduler.longest + 1, world.max_model_len) - prompt)
        most = max(1, int(most * self._outputs))
        limit = rng.choice((1, rng.randint(1, most), rng.randint(1, most), most, most))
        if rng.random() < 0.03:
            limit += world.max_model_len  # more than can be, though the end of the context may cut it
        if self._plain:
            event = Add(name, pieces, limit)
        else:
            event = Add(
                name,
                pieces,
                None if rng.random() < 0.1 else limit,
                n=rng.choice((1, 1, 1, 1, 2, 3)),
                seed=rng.choice((None, None, rng.randrange(100))),
                min_tokens=rng.choice((0, 0, 0, rng.randint(0, limit))),
                stop_token_ids=rng.choice(((), (), (2,))),
                ignore_eos=rng.random() < 0.3,
                salt=rng.choice(self._salts),
                penalty=rng.random() < 0.15,
                prompt_logprobs=rng.random() < 0.1,
            )
            if event.max_tokens is None:
                event = replace(event, min_tokens=0)
        self._added.append(event)
        return event

    def _prompt(self) -> tuple[Piece, ...]:
        """A fresh one, one that begins as a book or an earlier prompt does, or a chat that goes on."""
        rng = self._rng
        most = min(self._life.scheduler.longest, self._life.world.max_model_len - 1)
        part = max(1, int(most * self._prompts))
        length = rng.choice((rng.randint(1, part), rng.randint(1, part), part))
        if rng.random() >= self._shares:
            return ((rng.randrange(100, 10_000), length),)
        length = min(most, max(length, 1 + rng.randint(1, 3) * self._page_size))  # pages are shared, so some are due
        if not self._added or rng.random() < 0.3:
            shared = rng.randint(length // 3, length)
            return _pieces((rng.randrange(2), shared), (rng.randrange(100, 10_000), length - shared))
        earlier = rng.choice(self._added)
        taken = list(_cut(earlier.pieces, rng.choice((length, length, rng.randint(1, length)))))
        left = length - sum(n for _, n in taken)
        says = rng.randint(0, min(left, earlier.max_tokens or left)) if rng.random() < 0.6 else 0
        return _pieces(*taken, (SAYS, says), (rng.randrange(100, 10_000), left - says if rng.random() < 0.7 else 0))


def _cut(pieces: tuple[Piece, ...], length: int) -> Iterator[Piece]:
    """The first so many tokens of them."""
    for book, n in pieces:
        yield book, min(n, length)
        length -= min(n, length)


def _pieces(*pieces: Piece) -> tuple[Piece, ...]:
    """Without empty ones."""
    return tuple((book, n) for book, n in pieces if n) or ((100, 1),)
