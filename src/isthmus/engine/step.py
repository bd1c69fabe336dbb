"""What the planner hands the executor for one forward: plain NumPy arrays, nothing to look up.

    launch(1)   launch(2)   wait(1)   launch(3)   wait(2)   ...     an executor that overlaps
    launch(1)   wait(1)     launch(2) wait(2)     ...               one that does not

The scheduler speaks to an executor through `Step` alone, so the runner, the simulator's cost model and
a scripted executor in a test are interchangeable. All page ids here are virtual; the executor holds the
mirrors that make them physical (`Delta`), applied in order before the forward. Steps run one after the other, each
with its delta before it, so a step may count on whatever earlier ones write, settled or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from isthmus.memory import Delta
from isthmus.params import SamplingParams

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class BlockWrites:
    """New entries of the block table, in order: `table[row, column] = virtual`, ids of the space "tokens".

    0 says that no group has a page for these tokens. Columns at and past a sequence's end may hold old entries.
    """

    row: Int32
    column: Int32
    virtual: Int32


class TokenMask(Protocol):
    """Which tokens a sequence may go on with, worked out on the CPU beside the forward."""

    def prepare(self) -> None:
        """Begin to work it out; returns at once."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab_size], never all False; waits until it is worked out."""
        ...


@dataclass(slots=True)
class SampleRow:
    """One sequence that needs a token after this forward. Nobody changes it (frozen, hundreds cost too much a step)."""

    row: int  # the sequence's row, owner of sampler state on the executor
    index: int  # which of the step's tokens carries the logits: an index into `Step.tokens`
    params: SamplingParams
    seed: int | None  # base seed of this sequence, None for greedy or unseeded
    position: int  # how many tokens the sequence has, those in flight too: the counter of the seeded draw
    prompt: Sequence[int]  # token ids so far, for penalties; the executor must not change them
    output: Sequence[int]  # with a mask or a penalty complete until this step is settled; else it may lack the newest
    allow_eos: bool  # False while min_tokens holds the end back
    mask: TokenMask | None = None  # prepared before the step runs


@dataclass(frozen=True)
class ScoreSpan:
    """Prompt tokens whose log probabilities are wanted: token `start + i` of the step predicts `targets[i]`."""

    request_id: str
    position: int  # of the first target in the prompt
    start: int  # an index into `Step.tokens`
    targets: Int32  # [n]
    top: int  # how many of the most likely tokens to report beside each


@dataclass(frozen=True)
class Step:
    """One forward over a flat, variable-length batch: prefill chunks and decodes mixed.

    Sequence s owns tokens [query_start[s], query_start[s + 1]); `past[s]` tokens of it are cached before
    this step, so its positions are past[s] .. past[s] + n - 1. Its pages are row `rows[s]` of the block
    table: column c names tokens [c * page_size, (c + 1) * page_size).
    """

    delta: Delta
    block_writes: BlockWrites
    tokens: Int32  # [T]; -1: what this sequence's row sampled in the step before (any id, if it found none there)
    query_start: Int32  # [S + 1], query_start[0] = 0, query_start[S] = T
    past: Int32  # [S]
    rows: Int32  # [S], row of the block table
    samples: Sequence[SampleRow]
    states: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    """[S], virtual id of each sequence's state page; empty when the model has no state group. Where `past` is 0 the
    page is fresh and the state starts at zero, whatever the bytes are."""
    scores: tuple[ScoreSpan, ...] = ()
    plain: bool = False
    """All samples want the first maximum of their logits as they are, and nothing else. (False promises nothing.)"""


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token and its rank among all (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(slots=True)
class Sampled:
    """What came of one SampleRow, in the same order. Nobody changes it."""

    token_id: int  # -1 with a problem
    logprob: float | None = None  # of the chosen token, when logprobs were asked for
    rank: int | None = None
    top: tuple[Logprob, ...] = ()  # the `params.logprobs` most likely, best first
    problem: str | None = None  # why there is no token: the sequence cannot go on


Result: TypeAlias = int | Sampled
"""The token alone where nothing else is to say: no log probability was asked for, and there is no problem."""


class Results(Sequence[Result]):
    """Of hundreds of samples most are a token alone: all ids in one array, and what else there is to say of a few.

    Args:
        ids: [n] token ids, anything where `more` has an entry with a problem.
        more: by place.
    """

    def __init__(self, ids: NDArray[np.int32], more: Mapping[int, Sampled] | None = None) -> None:
        self.ids = ids
        self.more: Mapping[int, Sampled] = more or {}

    @classmethod
    def of(cls, results: Sequence[Result]) -> Results:
        """The same results."""
        if isinstance(results, cls):
            return results
        more = {i: result for i, result in enumerate(results) if isinstance(result, Sampled)}
        ids = [result.token_id if isinstance(result, Sampled) else result for result in results]
        return cls(np.array(ids, np.int32), more)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Result]:
        results: list[Result] = self.ids.tolist()
        for i, sampled in self.more.items():
            results[i] = sampled
        return iter(results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Result]: ...
    def __getitem__(self, index: int | slice) -> Result | Sequence[Result]:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return list(self)[index]


class Launched(Protocol):
    """A step that was handed to the device."""

    def wait(self) -> Sequence[Result]:
        """Block until the results are on the host; called once, in the order of the launches.

        One entry per `step.samples`, then one `Sampled` per target of `step.scores`.
        """
        ...


class Executor(Protocol):
    """Runs steps in the order given. It never changes the planner's state."""

    @property
    def overlaps(self) -> bool:
        """May a step be launched before the results of the one before it were taken? Two are out at most."""
        ...

    def launch(self, step: Step) -> Launched:
        """Apply the delta, run the forward, sample; an executor that overlaps returns before that is done."""
        ...


@dataclass(frozen=True)
class Landed:
    """Implements `Launched` for a step that was over when its launch returned."""

    results: Sequence[Result]

    def wait(self) -> Sequence[Result]:
        return self.results
