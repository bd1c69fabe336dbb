"""An executor without a model: its pages hold numbers, so that what a query reads can be checked to the token.

It applies deltas and block writes as a device does, writes what a step's tokens cache, reads what their queries may
see through block and page tables, and fails if a number is not the one that was written. The next token is a
function of all tokens so far (`script`), so every run has one right answer.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from isthmus.engine.samples import looks_back
from isthmus.engine.step import Landed, Result, Sampled, SampleRow, Step
from isthmus.memory import Frees, Group, Op, Pool, Writes

VOCAB = 97
_POISON = -7


def script(tokens: Sequence[int]) -> int:
    """The token that follows these: any fixed function will do."""
    value = 17
    for token in tokens[-9:]:
        value = (value * 31 + token) % 1_000_003
    return (value + len(tokens)) % VOCAB


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` output tokens of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(script(tokens))
    return tokens[len(prompt) :]


class _Mirror:
    """One group: page contents, `pages[physical][token in page]`, and the page table."""

    def __init__(self, group: Group, pool: Pool) -> None:
        self.group = group
        self.pages = np.full((pool.num_pages(group.name), group.spec.page_size), _POISON, np.int64)
        self.table = np.zeros(pool.ids(group.space).capacity + 1, np.int32)

    def apply(self, op: Op) -> None:
        if isinstance(op, Writes):
            self.table[op.virtual] = op.physical
        elif isinstance(op, Frees):
            self.pages[op.page] = _POISON
        else:
            self.pages[op.destination] = self.pages[op.source]


class ScriptedExecutor:
    """Implements `Executor` for any pool; `next_token` may replace the script."""

    overlaps = False

    def __init__(self, pool: Pool, num_rows: int, next_token: Callable[[Sequence[int]], int] = script) -> None:
        self._pool = pool
        self._next = next_token
        self._mirrors = {name: _Mirror(group, pool) for name, group in pool.groups.items()}
        self._blocks = np.zeros((num_rows, 4096), np.int32)
        self._cached: dict[int, list[int]] = {}  # by row: tokens that went through since its sequence began
        self.restored: Callable[[int, int], list[int] | None] | None = None
        """`(row, past)` -> the tokens that a row's hit stands for, when its sequence is new there."""
        self.steps: list[Step] = []

    def launch(self, step: Step) -> Landed:
        return Landed(told(step, self.run(step)))

    def run(self, step: Step) -> list[Sampled]:
        self.steps.append(step)
        for op in step.delta.ops:
            self._mirrors[op.group].apply(op)
        writes = step.block_writes
        self._blocks[writes.row, writes.column] = writes.virtual
        for s, row in enumerate(step.rows.tolist()):
            tokens = step.tokens[step.query_start[s] : step.query_start[s + 1]].tolist()
            self._extend(row, int(step.past[s]), tokens, int(step.states[s]) if len(step.states) else 0)
        return [self._sample(step, sample) for sample in step.samples]

    def _extend(self, row: int, past: int, tokens: list[int], state: int) -> None:
        assert tokens, "a scheduled sequence has at least one token"
        hit = self.restored(row, past) if self.restored is not None else None
        if hit is not None or past == 0:
            self._cached[row] = hit or []
        cached = self._cached[row]
        assert len(cached) == past, f"row {row} has {len(cached)} tokens cached, the step says {past}"
        for mirror in self._mirrors.values():
            if mirror.group.kind == "state":
                self._advance_state(mirror, state, cached, tokens)
            else:
                self._read(mirror, row, cached, len(tokens) == 1)
                self._write(mirror, row, past, tokens)
        cached += tokens

    def _read(self, mirror: _Mirror, row: int, cached: list[int], is_decode: bool) -> None:
        window = mirror.group.window
        first = 0 if window is None else max(0, len(cached) - window + 1)
        if not cached[first:]:
            return
        size = mirror.group.spec.page_size
        position = np.arange(first, len(cached))
        pages = mirror.table[self._blocks[row, position // size]]
        assert pages.all(), f"group {mirror.group.name} reads an unbound page at {position[pages == 0]}"
        found = mirror.pages[pages, position % size]
        want = np.array(cached[first:]) + position * VOCAB
        assert np.array_equal(found, want), f"group {mirror.group.name} reads other tokens than were written"

    def _write(self, mirror: _Mirror, row: int, past: int, tokens: list[int]) -> None:
        size = mirror.group.spec.page_size
        position = np.arange(past, past + len(tokens))
        pages = mirror.table[self._blocks[row, position // size]]
        assert pages[-1], f"group {mirror.group.name}: the newest token has no page"
        kept = pages > 0
        mirror.pages[pages[kept], position[kept] % size] = (np.array(tokens) + position * VOCAB)[kept]

    def _advance_state(self, mirror: _Mirror, state: int, cached: list[int], tokens: list[int]) -> None:
        page = mirror.table[state]
        assert page, "the sequence has no state page"
        assert not cached or mirror.pages[page, 0] == _digest(cached), "the state is another one's"
        mirror.pages[page, 0] = _digest([*cached, *tokens])

    def _sample(self, step: Step, sample: SampleRow) -> Sampled:
        owner = int(np.searchsorted(step.query_start, sample.index, side="right")) - 1
        assert sample.row == step.rows[owner]
        assert sample.index == step.query_start[owner + 1] - 1, "logits are of a sequence's last token"
        tokens, known = self._cached[sample.row], [*sample.prompt, *sample.output]
        assert tokens[: len(known)] == known, "the tokens that went through are not the sequence's"
        assert len(tokens) <= len(known) + 1, "more than one token was not known when the step was planned"
        assert len(tokens) == len(known) or not looks_back(sample.params), "a choice that cannot be made yet"
        assert sample.position == len(tokens)
        assert sample.allow_eos == (len(tokens) - len(sample.prompt) >= sample.params.min_tokens)
        return Sampled(self._next(tokens), logprob=-0.5, rank=1)


class Runs(Protocol):
    """What `Overlapping` wraps: a scripted executor, or the runner."""

    def run(self, step: Step) -> list[Sampled]: ...


class Overlapping:
    """Implements `Executor` one step ahead of its results, as a GPU is, with an executor that runs at once.

    It keeps what every row sampled last, puts it where a step says -1, and hands results over in order, not before it
    was asked. Two launches may be out.
    """

    overlaps = True

    def __init__(self, inner: Runs) -> None:
        self.inner = inner
        self.out: deque[_Late] = deque()  # launched, not waited for
        self.launches = 0
        self.fed_back = 0  # tokens that no host knew when they went in
        self._last: dict[int, int] = {}  # by row: what it sampled in the step before

    def launch(self, step: Step) -> _Late:
        self.launches += 1
        assert len(self.out) < 2, "a third step was launched before the results of the first were taken"
        results = self.inner.run(dataclasses.replace(step, tokens=self._resolve(step)))
        self._last = {row.row: result.token_id for row, result in zip(step.samples, results, strict=False)}
        self.out.append(_Late(self, told(step, results)))
        return self.out[-1]

    def _resolve(self, step: Step) -> np.ndarray:
        tokens = step.tokens.copy()
        for i in np.flatnonzero(tokens == -1).tolist():
            row = int(step.rows[np.searchsorted(step.query_start, i, side="right") - 1])
            assert row in self._last, f"row {row} sampled nothing in the step before"
            tokens[i] = max(0, self._last[row])  # any id will do where there was a problem
            self.fed_back += 1
        return tokens


@dataclasses.dataclass(eq=False)
class _Late:
    """Implements `Launched`."""

    owner: Overlapping
    results: Sequence[Result]

    def wait(self) -> Sequence[Result]:
        assert self.owner.out.popleft() is self, "results are taken in the order of the launches, once"
        return self.results


def told(step: Step, results: Sequence[Sampled]) -> Sequence[Result]:
    """As a device tells it: of samples that want no logprobs and have no problem the token alone."""
    alone = [row.params.logprobs is None for row in step.samples]
    alone += [False] * (len(results) - len(alone))
    pairs = zip(results, alone, strict=True)
    return [result.token_id if plain and result.problem is None else result for result, plain in pairs]


def _digest(tokens: Sequence[int]) -> int:
    value = 1
    for token in tokens:
        value = (value * 1_000_003 + token) % (2**31 - 1)
    return value
