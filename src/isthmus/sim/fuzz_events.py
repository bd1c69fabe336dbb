"""What happens in a fuzzed run, told so that every event stands for itself and means something without the others.

An event whose target is not there (any more), or not in the state it needs, does nothing. So any part of a script is a
script, which is what makes shrinking simple.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

from isthmus.engine.sequence import Request
from isthmus.params import SamplingParams
from isthmus.sim.fuzz_model import SAYS, Piece, tokens_of


@dataclass(frozen=True)
class Add:
    """A request arrives."""

    name: str
    pieces: tuple[Piece, ...]  # of the prompt
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    salt: str | None = None
    penalty: bool = False  # the next choice depends on the last one
    prompt_logprobs: bool = False

    def request(self, vocab: int) -> Request:
        """As a client sends it."""
        params = SamplingParams(
            n=self.n,
            temperature=0.0 if self.seed is None else 1.0,
            presence_penalty=0.5 if self.penalty else 0.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            prompt_logprobs=0 if self.prompt_logprobs else None,
        )
        return Request(self.name, tokens_of(self.pieces, vocab), params, self.salt)

    def __str__(self) -> str:
        prompt = " + ".join(f"{n} {'as it says' if book == SAYS else f'of book {book}'}" for book, n in self.pieces)
        told = {spec.name: getattr(self, spec.name) for spec in fields(self)[2:]}
        extras = "".join(
            f", {spec.name} {told[spec.name]}" for spec in fields(self)[2:] if told[spec.name] != spec.default
        )
        return f"add {self.name}: {prompt}{extras}"


@dataclass(frozen=True)
class Turn:
    """What an engine does in a step, so many times: schedule, launch, and take the results that are due."""

    times: int = 1

    def __str__(self) -> str:
        return f"turn x {self.times}"


@dataclass(frozen=True)
class Plan:
    """Schedule and launch alone."""

    def __str__(self) -> str:
        return "schedule and launch"


@dataclass(frozen=True)
class Land:
    """Settle the oldest step that is out."""

    def __str__(self) -> str:
        return "settle"


@dataclass(frozen=True)
class Abort:
    """A client vanishes."""

    name: str

    def __str__(self) -> str:
        return f"abort {self.name}"


@dataclass(frozen=True)
class Stop:
    """A sequence ends for a reason found outside."""

    name: str
    index: int

    def __str__(self) -> str:
        return f"stop {self.name}.{self.index}"


@dataclass(frozen=True)
class Preempt:
    """A running sequence has to go."""

    name: str
    index: int

    def __str__(self) -> str:
        return f"preempt {self.name}.{self.index}"


@dataclass(frozen=True)
class Spoil:
    """The next step of this sequence goes wrong for it."""

    name: str
    index: int

    def __str__(self) -> str:
        return f"spoil the next step of {self.name}.{self.index}"


@dataclass(frozen=True)
class Reset:
    """Forget every cached prefix that nobody uses."""

    def __str__(self) -> str:
        return "reset the prefix cache"


@dataclass(frozen=True)
class Compact:
    """Close all holes, while every so many-th page of each group is pinned; 0: none."""

    pinned: int = 0

    def __str__(self) -> str:
        return "compact" + (f" with every {self.pinned}. page pinned" if self.pinned else "")


@dataclass(frozen=True)
class Refuse:
    """The next so many snapshots find no room."""

    times: int

    def __str__(self) -> str:
        return f"refuse {self.times} snapshots"


Event: TypeAlias = Add | Turn | Plan | Land | Abort | Stop | Preempt | Spoil | Reset | Compact | Refuse
