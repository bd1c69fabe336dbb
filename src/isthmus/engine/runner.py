"""The executor that runs a model out of one arena on a CPU.

    run(step) = apply the delta -> index tensors per group -> forward -> logits of the sampled rows -> sample

It holds what a device holds (arena, page tables, block tables) and decides nothing: every id comes from the
planner. This is the checked path: an id or page out of range, or the read of a token that has no page, raises
IndexError naming group and id before the arena or a table is touched in its place; what came before it in the same
step has been done by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.engine import capacity
from isthmus.engine.head import Head
from isthmus.engine.sampler import score
from isthmus.engine.step import BlockWrites, Landed, Sampled, SampleRow, ScoreSpan, Step
from isthmus.kernels.reference import GroupBatch, LayerCache, PartView, Scratch, group_batch
from isthmus.kernels.states import StateStep
from isthmus.memory import Copies, Delta, Frees, Group, Moves, Op, Writes
from isthmus.model.attention import AttentionBatch
from isthmus.model.layout import ModelLayout, decoder
from isthmus.model.mixers import mixers
from isthmus.model.state_batch import StateBatch, state_views

Sampler: TypeAlias = Callable[[Tensor, Sequence[SampleRow]], list[Sampled]]
"""Logits `[R, vocab]` and R rows -> R tokens."""

Int64 = NDArray[np.int64]

_SCORE_BYTES = 64 << 20  # of float32 logits at a time


class _Mirror:
    """One group on the device: its pages, and the copy of its page table."""

    def __init__(self, arena: Tensor, group: Group, num_ids: int, poison: bool) -> None:
        self.group = group
        self.num_pages = arena.numel() // group.spec.page_bytes
        used = self.num_pages * group.spec.page_bytes
        self.pages = arena[:used].view(torch.int64).view(self.num_pages, -1)  # whole page envelopes
        self.table = np.zeros(num_ids + 1, np.int32)  # virtual -> physical, 0 = unbound
        self.poison = poison

    def apply(self, op: Op) -> None:
        """One operation of a delta. IndexError if it names an id or a page that does not exist."""
        if isinstance(op, Writes):
            self._check("virtual id", op.virtual, 1, len(self.table))
            self._check("page", op.physical, 0, self.num_pages)
            self.table[op.virtual] = op.physical
            return
        if isinstance(op, Frees):
            self._check("page", op.page, 1, self.num_pages)
            self._abandon(op.page)
            return
        self._check("page", op.source, 1, self.num_pages)
        self._check("page", op.destination, 1, self.num_pages)
        self.pages.index_copy_(0, _index(op.destination), self.pages.index_select(0, _index(op.source)))
        if isinstance(op, Moves):
            self._abandon(op.source)

    def _abandon(self, pages: NDArray[np.int32]) -> None:
        if self.poison:
            self.pages.index_fill_(0, _index(pages), -1)

    def check_ids(self, virtual: NDArray[np.int32]) -> None:
        """IndexError for an id that does not exist."""
        self._check("virtual id", virtual, 1, len(self.table))

    def translate(self, virtual: NDArray[np.int32]) -> Int64:
        """Physical pages of ids that were checked."""
        return self.table[virtual].astype(np.int64)

    def _check(self, what: str, values: NDArray[np.int32], low: int, high: int) -> None:
        wrong = (values < low) | (values >= high)
        if wrong.any():
            raise IndexError(f"group {self.group.name!r}: {what} {int(values[wrong][0])} is not in {low}..{high - 1}")


def _index(values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


class Runner:
    """Implements `isthmus.engine.step.Executor` with torch operators.

    Args:
        model: built with `attn_implementation="isthmus"`, weights loaded, in eval mode, on the CPU.
        layout: what `isthmus.model.layout.derive` made of it.
        arena_bytes: size of the arena; memory is committed by the operating system as pages are used.
        num_ids: capacity of each id space (`pool.capacities`).
        max_num_seqs: rows of the block table.
        sampler: turns logits into tokens.
        poison: fill what nobody owns with NaN, at the start and at every release (for tests; slow).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        arena_bytes: int,
        num_ids: Mapping[str, int],
        max_num_seqs: int,
        sampler: Sampler,
        *,
        poison: bool = False,
    ) -> None:
        self.model = model
        self.layout = layout
        self.sampler = sampler
        self.arena = torch.empty(arena_bytes, dtype=torch.uint8)
        if poison:
            self.arena.fill_(0xFF)  # NaN in every dtype a page can have
        self.mirrors = {g.name: _Mirror(self.arena, g, num_ids[g.space], poison) for g in layout.groups}
        page_size = capacity.page_size(layout.groups)
        self.blocks = np.zeros((max_num_seqs, -(-layout.max_model_len // page_size)), np.int32)
        self.caches = _layer_caches(self.arena, layout)
        self._tokens = [group for group in layout.groups if group.space == "tokens"]
        self._states = state_views(self.arena, layout.groups)
        self._mixers = list(mixers(model))
        self.head = Head(model)
        self._decoder = decoder(model)
        self.scratch = Scratch()
        self.num_ids = num_ids

    overlaps = False

    def launch(self, step: Step) -> Landed:
        """`run`: a step is over when its launch returns."""
        return Landed(self.run(step))

    def run(self, step: Step) -> list[Sampled]:
        """Apply the delta, run the forward, sample: one entry per `step.samples`, then one per target of `step.scores`.

        IndexError for an id or a page that does not exist.
        """
        with torch.inference_mode():
            self.apply(step.delta, step.block_writes)
            logits, hidden = self._forward(step)
            sampled = self.sampler(logits, step.samples) if step.samples else []
            return [*sampled, *self._scores(step.scores, hidden)]

    def apply(self, delta: Delta, writes: BlockWrites) -> None:
        """Bring arena, page tables and block tables to where the planner is."""
        for op in delta.ops:
            assert isinstance(op, Moves | Copies | Writes | Frees)
            self.mirrors[op.group].apply(op)
        rows, columns = self.blocks.shape
        for what, values, high in (
            ("row", writes.row, rows),
            ("column", writes.column, columns),
            ("virtual id", writes.virtual, self.num_ids.get("tokens", 0) + 1),
        ):
            wrong = (values < 0) | (values >= high)
            if wrong.any():
                raise IndexError(f"block table: {what} {int(values[wrong][0])} is not in 0..{high - 1}")
        self.blocks[writes.row, writes.column] = writes.virtual

    def tables(self) -> tuple[dict[str, Int64], NDArray[np.int32]]:
        """`({group: [ids + 1] physical pages}, block table [rows, columns])` as forwards use them."""
        every = {name: np.arange(len(mirror.table), dtype=np.int32) for name, mirror in self.mirrors.items()}
        return {name: mirror.translate(every[name]) for name, mirror in self.mirrors.items()}, self.blocks

    def forward(self, step: Step) -> Tensor:
        """Logits `[len(step.samples), vocab]` in the model's dtype."""
        return self._forward(step)[0]

    def _forward(self, step: Step) -> tuple[Tensor, Tensor]:
        """Logits of the samples, and the hidden states `[T, width]` if the step has scores (else empty)."""
        query_start, past = step.query_start.astype(np.int64), step.past.astype(np.int64)
        counts = np.diff(query_start)
        assert query_start[0] == 0
        assert query_start[-1] == len(step.tokens)
        assert (counts > 0).all()
        positions = np.arange(len(step.tokens)) + np.repeat(past - query_start[:-1], counts)
        groups = {
            group.name: group_batch(
                group,
                query_start,
                past,
                self._lookup(group.name, step.rows),
                chunked=group.name in self.layout.chunked,
            )
            for group in self._tokens
        }
        if self._mixers:
            self._bind_mixers(step, query_start, past)
        return self._call(step, _index(positions), groups)

    def _bind_mixers(self, step: Step, query_start: Int64, past: Int64) -> None:
        (mirror,) = (mirror for mirror in self.mirrors.values() if mirror.group.kind == "state")
        mirror.check_ids(step.states)
        batch = StateBatch(StateStep.of(query_start, past, mirror.translate(step.states)), self._states)
        for mixer in self._mixers:
            mixer.batch = batch

    def _lookup(self, group: str, rows: NDArray[np.int32]) -> Callable[[Int64, Int64], Int64]:
        mirror = self.mirrors[group]
        return lambda sequence, column: mirror.translate(self.blocks[rows[sequence], column])

    def _call(self, step: Step, positions: Tensor, groups: Mapping[str, GroupBatch]) -> tuple[Tensor, Tensor]:
        batch = AttentionBatch(groups, self.layout.layer_group, self.layout.owner, self.caches, self.scratch, positions)
        inputs = {
            "input_ids": _index(step.tokens)[None],
            "position_ids": positions[None],
            "use_cache": False,
            "attention_batch": batch,
        }
        wanted = torch.tensor([sample.index for sample in step.samples], dtype=torch.int64)
        if step.samples and not step.scores:
            return self.model(**inputs, logits_to_keep=wanted).logits[0], torch.empty(0)
        hidden = self._decoder(**inputs).last_hidden_state[0]
        logits = self.head(hidden[wanted]) if step.samples else torch.empty(0, self.layout.vocab_size)
        return logits, hidden if step.scores else torch.empty(0)

    def _scores(self, spans: Sequence[ScoreSpan], hidden: Tensor) -> list[Sampled]:
        """One result per target, by blocks of rows: logits of a whole prompt may be larger than the model."""
        rows = max(1, _SCORE_BYTES // (4 * self.layout.vocab_size))
        results: list[Sampled] = []
        for span in spans:
            targets = span.targets.tolist()
            for i in range(0, len(targets), rows):
                block = targets[i : i + rows]
                logits = self.head(hidden[span.start + i : span.start + i + len(block)])
                results += score(logits[:, : self.layout.vocab_size], block, [span.top] * len(block))
        return results


def _layer_caches(arena: Tensor, layout: ModelLayout) -> dict[int, LayerCache]:
    groups = {group.name: group for group in layout.groups}
    caches = {}
    for layer, owner in layout.owner.items():
        if owner == layer:
            group = groups[layout.layer_group[layer]]
            names = {part.name for part in group.spec.parts}
            key = PartView.of(arena, group, f"{layer}.k")
            value = PartView.of(arena, group, f"{layer}.v") if f"{layer}.v" in names else None
            caches[layer] = LayerCache(key, value)
    return caches
