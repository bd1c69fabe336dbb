"""What captured graphs would read, checked without a GPU: fixed places, padding, one forward for many lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.engine import device_runner
from isthmus.engine.graphs import Inputs, lane_counts, token_counts
from isthmus.engine.step import BlockWrites, Step
from isthmus.memory import Delta, Pool
from isthmus.model.compile import prepare
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import GEMMA, complete, engine_on, serve
from tests.model.harness import paged, reference, tiny


class Replayed:
    """In place of `Graphs`: runs the forward again over the inputs that were made at the start."""

    def __init__(
        self,
        forward: Callable[[Inputs], Any],
        inputs: Callable[[int], Inputs],
        sizes: Sequence[int],
        memory: tuple[int, int],
    ) -> None:
        self.sizes = tuple(sizes)
        self._forward = forward
        self._inputs = {size: inputs(size) for size in reversed(sizes)}

    def size(self, tokens: int) -> int:
        return next(n for n in self.sizes if n >= tokens)

    def replay(self, size: int) -> Any:
        return self._forward(self._inputs[size])


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
@pytest.mark.parametrize("compact", [False, True])
def test_one_forward_over_fixed_places_gives_transformers_tokens(
    monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    """A smaller step after a larger one reads nothing of it, in a poisoned arena."""
    monkeypatch.setattr(device_runner, "Graphs", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    model = tiny("gemma3_text", **GEMMA)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (n,), generator=draw).tolist() for n in (37, 1, 23, 9, 30, 17)]
    expected = [reference(model, prompt, 12) for prompt in prompts]
    twin = paged(model).requires_grad_(False)
    prepare(twin, compiled=False)
    engine = engine_on("cpu", twin, graphs=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert complete(engine, prompts, params, compact=compact) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_the_largest_graphs_have_room_for_their_padding(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Lanes are rounded up: there are more of them than sequences can ever be."""
    monkeypatch.setattr(device_runner, "Graphs", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    model = paged(tiny("gemma3_text", **GEMMA | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    prepare(model.requires_grad_(False), compiled=False)
    layout = derive(model, 4, "float32")
    pool, sizes = Pool(1 << 16, layout.groups), {True: lane_counts(rows)[-1:], False: token_counts(24)[-1:]}
    arena = torch.empty(pool.arena_bytes, dtype=torch.uint8)
    ids = pool.capacities
    runner = device_runner.DeviceRunner(model, layout, arena, ids, rows, 24, 64, (), graphs=sizes, poison=True)
    with torch.inference_mode():
        for alone, graphs in ((True, runner._decodes), (False, runner._mixed)):
            assert graphs is not None
            runner._inputs(alone, graphs.sizes[-1])  # the graphs share one place: what was there is another's
            graphs.replay(graphs.sizes[-1])  # a step of nothing but padding
    ones = Step(
        Delta(),
        BlockWrites(*(np.zeros(0, np.int32),) * 3),
        np.zeros(rows, np.int32),
        np.arange(rows + 1, dtype=np.int32),
        np.zeros(rows, np.int32),
        np.arange(rows, dtype=np.int32),
        (),
    )
    assert runner.run(ones) == []  # decodes that nobody samples: not for the graph of decodes


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
def test_more_table_writes_than_a_graph_has_places_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody long has left: its pages are all unbound in one step of decodes."""
    monkeypatch.setattr(device_runner, "Graphs", Replayed)
    monkeypatch.setattr(device_runner, "_WRITES", 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    model = tiny("gemma3_text", **GEMMA)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (n,), generator=draw).tolist() for n in (9, 20)]
    limits = (14, 4)
    expected = [reference(model, prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    twin = paged(model).requires_grad_(False)
    prepare(twin, compiled=False)
    engine = engine_on("cpu", twin, graphs=True)
    asked = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for prompt, n in zip(prompts, limits, strict=True)
    ]
    assert [output.outputs[0].token_ids for output in serve(engine, asked)] == expected


@pytest.mark.parametrize("most", [1, 4, 20, 256, 8192])
def test_sizes_ascend_and_reach_the_most(most: int) -> None:
    for sizes in (lane_counts(most), token_counts(most)):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[0] >= 2, "one row is a shape of its own"
        assert sizes[-1] >= most
    assert all(n % 8 == 0 for n in token_counts(most))
