"""An executor without a model: its pages hold numbers, so that what a query reads can be checked to the token.

It applies deltas and block writes as a device does, writes what a step's tokens cache, reads what their queries may
see through block and page tables, and fails if a number is not the one that was written. The next token is a
function of all tokens so far (`script`), so every run has one right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from isthmus.engine.step import Sampled, SampleRow, Step
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

    def __init__(self, pool: Pool, num_rows: int, next_token: Callable[[Sequence[int]], int] = script) -> None:
        self._pool = pool
        self._next = next_token
        self._mirrors = {name: _Mirror(group, pool) for name, group in pool.groups.items()}
        self._blocks = np.zeros((num_rows, 4096), np.int32)
        self._cached: dict[int, list[int]] = {}  # by row: tokens that went through since its sequence began
        self.restored: Callable[[int], list[int] | None] | None = None  # tokens that a row's hit stands for, when new
        self.steps: list[Step] = []

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
        hit = self.restored(row) if self.restored is not None else None
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
        tokens = [*sample.prompt, *sample.output]
        assert self._cached[sample.row] == tokens, "the tokens that went through are not the sequence's"
        assert sample.position == len(tokens)
        return Sampled(self._next(tokens), logprob=-0.5, rank=1)


def _digest(tokens: Sequence[int]) -> int:
    value = 1
    for token in tokens:
        value = (value * 1_000_003 + token) % (2**31 - 1)
    return value
