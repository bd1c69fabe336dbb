"""A device without a model: one arena of words in which every slot holds the mark of what was written there.

It applies deltas and block writes in order, as a device does; freed and moved bytes are poisoned. Before a step writes,
everything that its queries may see is read through block and page tables and compared, word by word:

    append   slots [0, past)               window   slots (past - window, past)               state   after past tokens

Groups share the bytes of the arena, and each has a key of its own, so a page of another sequence, of another group, an
old one and a free one all read wrong.

A step can be spoiled for a sequence: what it computes is tainted then (think of NaN), whoever reads a taint spreads
it, and instead of a token there is a problem. A taint tells which spoiled step it came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from isthmus.engine.blocks import ragged
from isthmus.engine.samples import looks_back
from isthmus.engine.step import BlockWrites, Result, Sampled, SampleRow, Step
from isthmus.memory import Copies, Delta, Frees, Group, Moves, Op, Pool, Writes
from isthmus.sim.fuzz_model import Truth

Int64 = NDArray[np.int64]
Words = NDArray[np.uint64]

_NOBODY: Mapping[int, int] = {}
_POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)
_TAINT = np.uint64(0xBAD0_BAD0_BAD0_0000)  # and the number of the spoiled step
_BITS = np.uint64(16)


class _Mirror:
    """One group: its page table, and its view of the arena: `pages[page, slot, word]`."""

    def __init__(self, group: Group, pool: Pool, arena: Words, key: int) -> None:
        self.group = group
        self.key = np.uint64(key)
        self.table = np.zeros(len(pool.table(group.name)), np.int64)
        size, page_bytes = group.spec.page_size, group.spec.page_bytes
        width = page_bytes // 8 // size
        shape = (len(arena) * 8 // page_bytes, size, width)
        self.pages: Words = as_strided(arena, shape, (page_bytes, 8 * width, 8))

    def apply(self, op: Op) -> None:
        if isinstance(op, Writes):
            self.table[op.virtual] = op.physical
        elif isinstance(op, Frees):
            self.pages[op.page] = _POISON
        else:
            assert not np.isin(op.destination, op.source).any(), f"{self.group.name}: a move lands on what moves"
            self.pages[op.destination] = self.pages[op.source]
            if isinstance(op, Moves):
                self.pages[op.source] = _POISON


class Shadow:
    """Runs steps at once; results are for their owner to hold back."""

    def __init__(self, pool: Pool, num_rows: int, most_tokens: int) -> None:
        arena = np.full(pool.arena_bytes // 8, _POISON, np.uint64)
        self._mirrors = {
            name: _Mirror(group, pool, arena, 0x51_7C_C1_B7 * (i + 1))
            for i, (name, group) in enumerate(pool.groups.items())
        }
        sizes = [g.spec.page_size for g in pool.groups.values() if g.space == "tokens"]
        self._page_size = sizes[0] if sizes else 1
        self._blocks = np.zeros((num_rows, most_tokens // self._page_size + 2), np.int64)
        self._last: dict[int, int] = {}  # by row: what it sampled in the step before
        self.taints = np.zeros(0, np.int64)  # by sequence of the newest step: the spoiled step it has read of, or 0
        self.seen: Counter[str] = Counter()

    def run(self, step: Step, truths: Sequence[Truth], spoiled: Mapping[int, int] = _NOBODY) -> list[Result]:
        """One result per sample.

        Args:
            truths: of each sequence of the step.
            spoiled: sequence of the step -> number (from 1) of the trouble that begins for it here.
        """
        self._apply(step.delta)
        self._write_blocks(step.block_writes)
        counts = np.diff(step.query_start).astype(np.int64)
        taints = self._resolve(step, truths, counts)
        for mirror in self._mirrors.values():
            np.maximum(taints, self._read(mirror, step, truths), out=taints)
        for s, number in spoiled.items():
            taints[s] = number
        for mirror in self._mirrors.values():
            self._write(mirror, step, truths, counts, taints)
        results = [self._sample(step, sample, truths, taints) for sample in step.samples]
        owner = {row: s for s, row in enumerate(step.rows.tolist())}
        self._last = {
            sample.row: result if isinstance(result, int) else -int(taints[owner[sample.row]])
            for sample, result in zip(step.samples, results, strict=True)
        }
        self.taints = taints
        return results

    def check(self, pool: Pool) -> None:
        """Assert that the page tables are the planner's. Between a step and whatever changes the pool next."""
        for name, mirror in self._mirrors.items():
            assert np.array_equal(mirror.table, pool.table(name).entries), f"{name}: the device has another page table"

    def _apply(self, delta: Delta) -> None:
        for op in delta.ops:
            self._mirrors[op.group].apply(op)
            if isinstance(op, Moves | Copies):
                self.seen["pages moved" if isinstance(op, Moves) else "states copied"] += len(op.source)

    def _write_blocks(self, writes: BlockWrites) -> None:
        self._blocks[writes.row, writes.column] = writes.virtual

    def _resolve(self, step: Step, truths: Sequence[Truth], counts: Int64) -> Int64:
        """Compare the tokens that go in. Returns the taints of those that the step before failed to sample."""
        tokens = step.tokens.astype(np.int64)
        taints = np.zeros(len(counts), np.int64)
        for i in np.flatnonzero(tokens == -1).tolist():
            s = int(np.searchsorted(step.query_start, i, side="right")) - 1
            row = int(step.rows[s])
            assert row in self._last, f"{truths[s].name}: row {row} sampled nothing in the step before"
            self.seen["tokens fed back"] += 1
            tokens[i], taints[s] = self._last[row], max(0, -self._last[row])
        past = step.past.astype(np.int64)
        for s in np.flatnonzero(taints == 0).tolist():
            found, truth = tokens[step.query_start[s] : step.query_start[s + 1]], truths[s]
            want = truth.tokens[past[s] : past[s] + counts[s]]
            assert np.array_equal(found, want), f"{truth.name}: tokens from {past[s]} on are {found}, not {want}"
        return taints

    def _read(self, mirror: _Mirror, step: Step, truths: Sequence[Truth]) -> Int64:
        """Compare what is seen in a group. Returns the newest taint that each sequence saw."""
        past = step.past.astype(np.int64)
        if mirror.group.kind == "state":
            which = np.flatnonzero(past)
            position = past[which] - 1
            found = mirror.pages[self._state_pages(mirror, step, truths)[which], 0]
        else:
            first = (
                np.zeros_like(past) if mirror.group.window is None else np.maximum(past - mirror.group.window + 1, 0)
            )
            which, position = ragged(first, past)
            page = mirror.table[self._blocks[step.rows[which], position // self._page_size]]
            for i in np.flatnonzero(page == 0)[:1].tolist():
                s = which[i]
                raise AssertionError(
                    f"{truths[s].name} at {past[s]}: {mirror.group.name} has no page for {position[i]}"
                )
            found = mirror.pages[page, position % self._page_size]
        want = _marks(truths, which, position) ^ mirror.key
        self.seen["slots read"] += len(which)
        taint = np.where(found >> _BITS == _TAINT >> _BITS, found ^ _TAINT, np.uint64(0)).max(axis=1, initial=0)
        saw = taint > 0
        for i in np.flatnonzero((found != want[:, None]).any(axis=1) & ~saw)[:1].tolist():
            s, what = which[i], "freed bytes" if (found[i] == _POISON).any() else "what others wrote"
            raise AssertionError(f"{truths[s].name} at {past[s]}: {mirror.group.name} reads {what} for {position[i]}")
        taints = np.zeros(len(past), np.int64)
        np.maximum.at(taints, which[saw], taint[saw].astype(np.int64))
        return taints

    def _write(self, mirror: _Mirror, step: Step, truths: Sequence[Truth], counts: Int64, taints: Int64) -> None:
        past = step.past.astype(np.int64)
        if mirror.group.kind == "state":
            which, position = np.arange(len(past)), past + counts - 1
            page, slot = self._state_pages(mirror, step, truths), np.zeros(len(past), np.int64)
        else:
            which, position = ragged(past, past + counts)
            page = mirror.table[self._blocks[step.rows[which], position // self._page_size]]
            for s in np.flatnonzero(page[np.cumsum(counts) - 1] == 0)[:1].tolist():
                raise AssertionError(f"{truths[s].name}: {mirror.group.name} has no page for its newest token")
            kept = page > 0  # of a chunk longer than a window, the head is nowhere
            which, position, page = which[kept], position[kept], page[kept]
            slot = position % self._page_size
        marks = np.where(
            taints[which] > 0, _TAINT | taints[which].astype(np.uint64), _marks(truths, which, position) ^ mirror.key
        )
        mirror.pages[page, slot] = marks[:, None]

    def _state_pages(self, mirror: _Mirror, step: Step, truths: Sequence[Truth]) -> Int64:
        pages = mirror.table[step.states]
        for s in np.flatnonzero((step.states == 0) | (pages == 0))[:1].tolist():
            raise AssertionError(f"{truths[s].name}: {mirror.group.name} has no page for its state")
        return pages

    def _sample(self, step: Step, sample: SampleRow, truths: Sequence[Truth], taints: Int64) -> Result:
        s = int(np.searchsorted(step.query_start, sample.index, side="right")) - 1
        truth, prompt, known = truths[s], len(sample.prompt), len(sample.prompt) + len(sample.output)
        end = int(step.past[s]) + int(step.query_start[s + 1] - step.query_start[s])
        assert sample.row == step.rows[s], f"{truth.name}: samples in a foreign row"
        assert sample.index == step.query_start[s + 1] - 1, f"{truth.name}: logits are not of its last token"
        assert sample.position == end, f"{truth.name}: has {end} tokens, not {sample.position}"
        assert end - 1 <= known <= end, f"{truth.name}: {known} of {end} tokens known when the step was planned"
        assert known == end or not looks_back(sample.params), f"{truth.name}: a choice that cannot be made yet"
        assert sample.allow_eos == (end - prompt >= sample.params.min_tokens), f"{truth.name}: when it may end"
        self.seen["tokens sampled"] += 1
        if taints[s]:
            return Sampled(-1, problem="the logits are not finite")
        return int(truth.tokens[end]) if end < len(truth.tokens) else 0  # it has ended, and nobody knew


def _marks(truths: Sequence[Truth], which: Int64, position: Int64) -> Words:
    """The mark of each position of sequence `which`, ascending."""
    cut = np.searchsorted(which, np.arange(len(truths) + 1))
    parts = [truth.marks[position[cut[s] : cut[s + 1]]] for s, truth in enumerate(truths)]
    return np.concatenate(parts)
