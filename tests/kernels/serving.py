"""Sequences of unequal lengths that go through a state operation step by step, over an arena full of NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.kernels.states import StateStep, state_view
from isthmus.memory import Group, state_spec

LENGTHS = [1, 130, 2, 7, 64, 65, 1, 33]
"""Of sequences that one step has decodes, short and long chunks of."""

Cut = Callable[[int, int], int]
"""A sequence, and how many steps there were before -> how many of its tokens the next step gets, at most."""

CUTS: dict[str, Cut] = {
    "whole": lambda s, steps: max(LENGTHS),
    "one by one": lambda s, steps: 1,
    "sevens": lambda s, steps: 7,
    "sixty-fours": lambda s, steps: 64,
    "ragged": lambda s, steps: (1, 40, 3, 1, 17, 0)[(steps + s) % 6],  # decodes and chunks mixed; some sit out
}


class States:
    """A page for each of so many sequences, in no order, among pages of nobody."""

    def __init__(self, sequences: int, shape: tuple[int, ...], dtype: str = "float32") -> None:
        parts = [("0.other", (3,), "bfloat16"), ("0.state", shape, dtype), ("1.state", shape, dtype)]
        self.group = Group("state", state_spec(parts), "state")
        count = 2 * sequences + 1
        self.arena = torch.full((count * self.group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
        self.pages = np.random.default_rng(0).permutation(np.arange(1, count))[:sequences]
        self.view = state_view(self.arena, self.group, "0.state")
        self._before = self.now

    @property
    def now(self) -> Tensor:
        """`[sequences, *shape]`."""
        return self.view[torch.from_numpy(self.pages)]

    def only_theirs_changed(self) -> bool:
        """Whether every other byte of the arena is as it was."""
        rest = self.arena.clone()
        state_view(rest, self.group, "0.state")[torch.from_numpy(self.pages)] = self._before
        return bool((rest == 0xFF).all())


def serve(operation: Callable[[StateStep, Tensor], Tensor], lengths: Sequence[int], states: States, cut: Cut) -> Tensor:
    """Every token of every sequence, `[sum of lengths, ..]`; `operation(step, tokens)` gets the step's, as indices."""
    starts = np.cumsum([0, *lengths])
    past = np.zeros(len(lengths), np.int64)
    tokens, outs = [], []
    for steps in itertools.count():
        counts = np.array([min(cut(s, steps), n - p) for s, (n, p) in enumerate(zip(lengths, past, strict=True))])
        mine = np.flatnonzero(counts)
        if not len(mine):
            if (past == lengths).all():
                break
            continue
        rows = np.concatenate([np.arange(counts[s]) + starts[s] + past[s] for s in mine])
        step = StateStep.of(np.cumsum([0, *counts[mine]]), past[mine], states.pages[mine])
        tokens.append(torch.from_numpy(rows))
        outs.append(operation(step, tokens[-1]))
        past += counts
    return torch.cat(outs)[torch.cat(tokens).argsort()]


def sequences(lengths: Sequence[int]) -> list[slice]:
    """Where the tokens of each lie."""
    ends = np.cumsum(lengths).tolist()
    return [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]
