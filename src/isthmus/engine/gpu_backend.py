"""A model on an NVIDIA GPU: Triton kernels, compiled layers, CUDA graphs, and an arena sized by measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from triton.runtime.errors import OutOfResources

from isthmus.engine import sizing
from isthmus.engine.config import EngineConfig
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import lane_counts, token_counts
from isthmus.engine.laps import Laps
from isthmus.engine.padding import ALIGN
from isthmus.engine.step import BlockWrites, Executor, SampleRow, ScoreSpan, Step
from isthmus.errors import ModelError
from isthmus.memory import Delta, Pool
from isthmus.memory.group import null_bytes
from isthmus.model.compile import prepare
from isthmus.model.convert import cache_root
from isthmus.model.layout import ModelLayout
from isthmus.params import SamplingParams

_GRAPH_BYTES = 8 << 20  # that the driver keeps of one graph, with room to spare
_EXACT = 8  # decodes, that there are graphs of every number up to: padding is routed too, to experts of its own


@dataclass(frozen=True)
class Footprint:
    """What running takes on the device beside weights and arena, in bytes, as measured."""

    activations: int  # of the largest step, launch by launch
    graphs: int


class GpuBackend:
    """Triton kernels, compiled layers and CUDA graphs."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        config: EngineConfig,
        eos_token_ids: Collection[int],
        laps: Laps,
    ) -> None:
        self._model, self._layout, self._config, self._eos = model, layout, config, eos_token_ids
        self._device = next(model.parameters()).device
        self._graphs = not config.device.enforce_eager
        self._chunks_in_graphs = True
        self._arena: Tensor | None = None
        # Where compiled layers are kept for the next start; whoever has set a place for them keeps it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "compiled"))
        prepared = prepare(model, compiled=self._graphs)
        self.described = str(prepared)
        self._exact = _EXACT if prepared.experts else 0
        self._has_states = any(group.kind == "state" for group in layout.groups)
        self.footprint = self._measure(laps)
        self.graph_bytes = self.footprint.graphs

    def arena_bytes(self) -> int:
        """See `Backend`. A share of the device less what weights, activations, graphs and others take."""
        memory = self._config.memory
        gc.collect()
        torch.cuda.empty_cache()  # what was measured is reserved below, and not in use any more
        free, total = torch.cuda.mem_get_info(self._device)
        taken = total - free
        reserve = self.footprint.activations + self.footprint.graphs
        room = int(total * memory.gpu_memory_utilization) - taken - reserve
        return sizing.device_arena_bytes(memory, self._layout.groups, room, free - reserve, taken, reserve)

    def executor(self, pool: Pool, max_model_len: int) -> Executor:
        """See `Backend`."""
        if self._arena is None:
            self._arena = torch.empty(pool.arena_bytes, dtype=torch.uint8, device=self._device)
        assert self._arena.numel() == pool.arena_bytes
        gc.collect()  # an executor that was there before has graphs, which hold memory
        sizes = self._sizes() if self._graphs else {}
        return self._runner(self._arena, pool.capacities, max_model_len, sizes)

    def _sizes(self) -> dict[bool, tuple[int, ...]]:
        """Of graphs: for decodes alone, and for other steps, but not where those have states of which chunks take
        operations in numbers that depend on their lengths."""
        scheduler = self._config.scheduler
        sizes = {True: lane_counts(scheduler.max_num_seqs, self._exact)}
        if self._chunks_in_graphs:
            most = scheduler.max_num_batched_tokens
            sizes[False] = token_counts(most)
            if self._has_states and sizes[False][-1] == most:
                sizes[False] += (most + ALIGN,)  # with states a token is padding's, see `ChunkPlaces`
        return sizes

    def _runner(
        self, arena: Tensor, num_ids: Mapping[str, int], max_model_len: int, graphs: Mapping[bool, Sequence[int]]
    ) -> DeviceRunner:
        scheduler = self._config.scheduler
        return DeviceRunner(
            self._model,
            self._layout,
            arena,
            num_ids,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            max_model_len,
            self._eos,
            graphs=graphs,
            early=self._graphs,
            poison=self._config.memory.check_memory == "full",
        )

    def _measure(self, laps: Laps) -> Footprint:
        """Run the largest steps there can be over an arena of null pages, which also compiles every kernel."""
        scheduler, longest = self._config.scheduler, self._config.model.max_model_len or self._layout.max_model_len
        arena = torch.zeros(2 * null_bytes(self._layout.groups), dtype=torch.uint8, device=self._device)
        steps = warm_steps(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, longest)
        before = torch.cuda.memory_allocated(self._device)
        ids = {"tokens": 1, "states": 1}
        runner = self._runner(arena, ids, longest, {})
        runner.warm_pages()
        with _refused():
            activations = self._peak(runner, steps, before)
        self._chunks_in_graphs = runner.chunks_in_graphs
        laps.lap("layers and kernels compiled")
        if not self._graphs:
            return Footprint(activations, 0)
        launched = self._peak(runner, steps, before) if self._has_states else 0  # without what compiling took
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        sizes = self._sizes()
        # The largest of each sort, and one decode: it is compiled apart.
        captured = {alone: [n for n in some if n in (1, some[-1])] for alone, some in sizes.items()}
        with _refused():
            runner = self._runner(arena, ids, longest, captured)
        torch.cuda.empty_cache()
        largest = free - torch.cuda.mem_get_info(self._device)[0]
        width, itemsize = self._model.config.get_text_config().hidden_size, self._model.dtype.itemsize
        # The other graphs run in the memory of the largest; what they hand out is theirs, and so are their launches.
        each = {True: self._layout.vocab_size, False: width}
        rest = {alone: [n for n in some if n not in captured[alone]] for alone, some in sizes.items()}
        others = itemsize * sum(each[alone] * sum(some) for alone, some in rest.items())
        launches = _GRAPH_BYTES * sum(map(len, rest.values()))
        replayed = self._peak(runner, steps, torch.cuda.memory_allocated(self._device))
        activations = max(launched, replayed)  # with states there are steps that no graph holds
        laps.lap("graphs measured")
        return Footprint(activations, max(0, largest) + others + launches)

    def _peak(self, runner: DeviceRunner, steps: Sequence[Step], before: int) -> int:
        """Bytes allocated beyond `before` while the steps run."""
        torch.cuda.reset_peak_memory_stats(self._device)
        for step in steps:
            runner.run(step)
        return torch.cuda.max_memory_allocated(self._device) - before


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What cannot be compiled, or launched here, in a line that says what to do."""
    try:
        yield
    except TorchDynamoException as error:
        line = str(error).strip().splitlines()[0]
        raise ModelError(f"the layers cannot be compiled: use --enforce-eager ({line})") from error
    except OutOfResources as error:
        line = str(error).strip().splitlines()[0]
        raise ModelError(f"a kernel does not fit this GPU: use --dtype bfloat16, or --device cpu ({line})") from error


def warm_steps(max_num_seqs: int, max_tokens: int, longest: int) -> list[Step]:
    """The largest step of each sort: prefill to the budget, of few sequences, scored too, and of most; decodes with
    every kind of sampling, both; and prefill of a quarter of the tokens, of a quarter of these, ..: kernels are built
    for some sizes.

    No sequence has a page, so all of them read and write the null page.
    """
    greedy = SamplingParams(temperature=0.0)
    drawn = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01)
    edited = SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.1, logit_bias={0: 1.0})
    scored = SamplingParams(temperature=0.0, logprobs=1)
    mixed = [greedy, drawn, edited, scored]
    whole, *smaller = (
        _blank(prompts, [greedy]) for prompts in _quarters(max_tokens, max_num_seqs, most=max(1, longest - 1))
    )
    scores = ScoreSpan("warm", 1, 0, np.zeros(max(0, int(whole.query_start[1]) - 1), np.int32), 1)
    steps = [
        whole,
        dataclasses.replace(whole, scores=(scores,)),
        *smaller,
        _blank([1] * max_num_seqs, [greedy]),
        _blank([1] * max_num_seqs, mixed),
    ]
    if max_num_seqs > 1 and max_tokens > 3:
        steps.append(_blank([2, 1], mixed))
        chunks = min(max_num_seqs, max_tokens // 2)  # each may have a copy of its state, or rows of its own
        steps.append(_blank([max(2, min(longest - 1, max_tokens // chunks))] * chunks, [greedy]))
    return steps


def _quarters(tokens: int, sequences: int, most: int) -> Iterator[list[int]]:
    """Prompts of so many tokens together, of at most so many each as far as there are sequences; of a quarter; .."""
    while tokens:
        prompts = [most] * min(tokens // most, sequences)
        if len(prompts) < sequences and tokens > sum(prompts):
            prompts.append(tokens - sum(prompts))
        yield prompts
        tokens //= 4


def _blank(counts: list[int], params: list[SamplingParams]) -> Step:
    none = np.zeros(0, np.int32)
    start = np.cumsum([0, *counts]).astype(np.int32)
    samples = tuple(
        SampleRow(row, int(start[row + 1]) - 1, params[row % len(params)], None, n, [0] * n, [], True)
        for row, n in enumerate(counts)
    )
    return Step(
        Delta(),
        BlockWrites(none, none, none),
        np.zeros(int(start[-1]), np.int32),
        start,
        np.zeros(len(counts), np.int32),
        np.arange(len(counts), dtype=np.int32),
        samples,
        np.zeros(len(counts), np.int32),
    )
