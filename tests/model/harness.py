"""A planner small enough to read at once, that drives a Runner against a real Pool, and tiny models to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from isthmus.engine.runner import Runner
from isthmus.engine.step import BlockWrites, Sampled, SampleRow, Step
from isthmus.memory import Plan, Pool
from isthmus.model.layout import derive
from isthmus.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def tiny(model_type: str, *, seed: int = 0, **values: Any) -> PreTrainedModel:
    """A model with random weights large enough that its greedy tokens vary; built for Transformers' eager attention."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(1.0, 2.0)
            elif name.endswith("A_log"):  # decays at which a state remembers more than a token
                weight.uniform_(-5.0, 0.0)
            elif name.endswith("dt_bias"):
                weight.uniform_(-3.0, 0.0)
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def paged(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights behind attention "isthmus"."""
    twin = AutoModelForCausalLM.from_config(model.config, attn_implementation="isthmus", dtype=torch.float32).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def reference(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    """Transformers' own greedy continuation, with its own cache."""
    for module in model.modules():
        if hasattr(module, "conv1d_state"):  # RecurrentGemma's, which outlives a call
            module.conv1d_state = None
    tokens = torch.tensor([prompt])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False)
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation


def argmax(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """The simplest sampler."""
    assert logits.shape[0] == len(rows)
    assert logits.isfinite().all()
    return [Sampled(token) for token in logits.argmax(-1).tolist()]


@dataclass
class Run:
    """One running sequence."""

    row: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    past: int = 0
    ids: list[int] = field(default_factory=list)  # virtual page id of each column; 0: never had one, or dead

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Harness:
    """Plans steps: every sequence advances in every step, by a chunk of its prompt or by one token."""

    def __init__(
        self, model: PreTrainedModel, page_size: int, arena_bytes: int = 1 << 22, *, compact: bool = False
    ) -> None:
        self.layout = derive(model, page_size, "float32")
        self.page_size = page_size
        self.pool = Pool(arena_bytes, self.layout.groups)
        self.runner = Runner(model, self.layout, arena_bytes, self.pool.capacities, 8, argmax, poison=True)
        self.compact = compact
        self.covering = self.pool.covering["tokens"]
        self.bound: dict[str, set[int]] = {group.name: set() for group in self.layout.groups}

    def generate(self, prompts: Sequence[Sequence[int]], new: int, chunk: int) -> list[list[int]]:
        """Greedy continuations of all prompts, run together; a finished sequence gives its pages back at once."""
        sequences = [Run(row, list(prompt)) for row, prompt in enumerate(prompts)]
        running = sequences
        while running:
            self.step(running, chunk)
            for s in running:
                if len(s.output) == new:
                    self._release([i for i in s.ids if i])
            running = [s for s in running if len(s.output) < new]
        self.pool.check()
        return [s.output for s in sequences]

    def step(self, sequences: Sequence[Run], chunk: int) -> None:
        """One step of all those sequences."""
        counts = [min(chunk, len(s.tokens) - s.past) for s in sequences]
        writes = self._bind(sequences, counts)
        done = [s.past + n == len(s.tokens) for s, n in zip(sequences, counts, strict=True)]
        query_start = np.cumsum([0, *counts]).astype(np.int32)
        samples = tuple(
            SampleRow(s.row, int(end) - 1, GREEDY, None, len(s.tokens), s.prompt, s.output, True)
            for s, end, last in zip(sequences, query_start[1:], done, strict=True)
            if last
        )
        step = Step(
            self.pool.take_delta(),
            writes,
            np.array(
                [t for s, n in zip(sequences, counts, strict=True) for t in s.tokens[s.past : s.past + n]], np.int32
            ),
            query_start,
            np.array([s.past for s in sequences], np.int32),
            np.array([s.row for s in sequences], np.int32),
            samples,
        )
        sampled = iter(self.runner.run(step))
        for s, n, last in zip(sequences, counts, done, strict=True):
            s.past += n
            if last:
                s.output.append(next(sampled).token_id)
            self._drop_passed(s)

    def _bind(self, sequences: Sequence[Run], counts: Sequence[int]) -> BlockWrites:
        if self.compact:
            self.pool.compact()
        places: list[tuple[Run, int]] = []  # columns that get an id
        binds: dict[str, list[tuple[Run, int]]] = {group.name: [] for group in self.layout.groups}
        for s, n in zip(sequences, counts, strict=True):
            for column in range(len(s.ids), -(-(s.past + n) // self.page_size)):
                s.ids.append(0)
                for group in self.layout.groups:
                    if group.window is None or (column + 1) * self.page_size > s.past + n - group.window + 1:
                        binds[group.name].append((s, column))
                        if (s, column) not in places:
                            places.append((s, column))
        plan = self.pool.plan({name: len(columns) for name, columns in binds.items()})
        assert isinstance(plan, Plan), plan.message
        for (s, column), virtual in zip(places, plan.ids["tokens"].tolist(), strict=True):
            s.ids[column] = virtual
        ids = {name: np.array([s.ids[c] for s, c in columns], np.int64) for name, columns in binds.items()}
        self.pool.commit(plan, {name: ids[name] for name in ids if name not in self.covering})
        for name, virtual in ids.items():
            self.bound[name].update(virtual.tolist())
        entries = np.array([(s.row, c, s.ids[c]) for s, c in places], np.int32).reshape(-1, 3)
        return BlockWrites(entries[:, 0], entries[:, 1], entries[:, 2])

    def _drop_passed(self, s: Run) -> None:
        """Give back what no later query can see."""
        for group in self.layout.groups:
            if group.window is None:
                continue
            dead = s.ids[: max(0, s.past - group.window + 1) // self.page_size]
            passed = [i for i in dead if i in self.bound[group.name]]
            if passed and group.name in self.covering:
                self._release(passed)
            elif passed:
                self.pool.unbind(group.name, np.array(passed, np.int64))
            self.bound[group.name].difference_update(passed)
            if group.name in self.covering:
                s.ids[: len(dead)] = [0] * len(dead)

    def _release(self, ids: list[int]) -> None:
        self.pool.release("tokens", np.array(ids, np.int64))
        for bound in self.bound.values():
            bound.difference_update(ids)
