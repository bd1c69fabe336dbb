"""What captured graphs would read, checked without a GPU: fixed places, padding, one forward for many lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.engine import device_runner
from isthmus.engine.core import Engine
from isthmus.engine.device_plan import DevicePlan
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import Inputs, lane_counts, token_counts
from isthmus.engine.packing import Layout, Packer
from isthmus.engine.step import BlockWrites, Step
from isthmus.kernels import plan as planning
from isthmus.kernels.reference import Scoring
from isthmus.memory import Delta, Pool
from isthmus.model.compile import prepare
from isthmus.model.device_attention import DeviceBatch
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import ENDLESS, GEMMA, complete, engine_on, random_prompts, serve
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


def served(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, **settings: Any) -> Engine:
    """An engine whose steps are run over the fixed places that graphs would read."""
    monkeypatch.setattr(device_runner, "Graphs", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    twin = paged(model).requires_grad_(False)
    prepare(twin, compiled=False)
    return engine_on("cpu", twin, graphs=True, **settings)


def blind(batch: DeviceBatch, query: Tensor, key: Tensor, value: Tensor, layer: int, how: Scoring) -> Tensor:
    """Attention that looks at nothing, where the answers do not matter."""
    return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
@pytest.mark.parametrize("compact", [False, True])
def test_one_forward_over_fixed_places_gives_transformers_tokens(
    monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    """A smaller step after a larger one reads nothing of it, in a poisoned arena."""
    model = tiny("gemma3_text", **GEMMA)
    prompts = random_prompts(37, 1, 23, 9, 30, 17)
    expected = [reference(model, prompt, 12) for prompt in prompts]
    engine = served(monkeypatch, model)
    assert complete(engine, prompts, SamplingParams(max_tokens=12, **ENDLESS), compact=compact) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
def test_chunks_behind_long_pasts_give_transformers_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles are cut into parts, in steps of every size, a full layer's and a window's, with decodes beside."""
    for name, value in {"SHORTEST": 32, "TILE_PART": 0, "TILE_MERGE": 0}.items():
        monkeypatch.setattr(planning, name, value)
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 90}
    model = tiny("gemma3_text", **GEMMA | layers)
    prompts = random_prompts(5, 103)
    expected = [reference(model, prompt, 6) for prompt in prompts]
    engine = served(monkeypatch, model)
    of = DevicePlan.of
    cut: set[tuple[str, bool]] = set()

    def planned(step: Step, *args: Any) -> DevicePlan:
        made = of(step, *args)
        for name, group in made.groups.items():
            if group.tiles is not None and group.tiles.slots:
                cut.add((name, len(group.decodes.items) > 0))
        return made

    monkeypatch.setattr(DevicePlan, "of", planned)
    assert complete(engine, prompts, SamplingParams(max_tokens=6, **ENDLESS), compact=True) == expected
    assert {name for name, _ in cut} == set(engine.pool.groups)
    assert {beside for _, beside in cut} == {True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
@pytest.mark.parametrize("writes", [3, 1 << 11])
def test_tables_are_written_and_translated_in_the_graph(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """A replay is all there is to launch, unless pages move or there are more table writes than places."""
    monkeypatch.setattr(device_runner, "_WRITES", writes)
    monkeypatch.setattr(DeviceBatch, "run", blind)
    engine = served(monkeypatch, tiny("gemma3_text", **GEMMA))
    runner = engine.executor
    assert isinstance(runner, DeviceRunner)
    runner._poison = False  # it fills pages that are free, on a launch's own account
    launched: list[str] = []
    steps: list[tuple[list[str], DevicePlan]] = []

    def note(name: str) -> None:
        real = getattr(device_runner, name)

        def noted(*args: Any, **named: Any) -> Any:
            launched.append(name)
            return real(*args, **named)

        monkeypatch.setattr(device_runner, name, noted)

    for name in ("scatter", "translate", "copy_pages"):
        note(name)
    replay, of = Replayed.replay, DevicePlan.of

    def alone(graphs: Replayed, size: int) -> Any:
        launched.append("(")
        outputs = replay(graphs, size)
        launched.append(")")
        return outputs

    def planned(*args: Any) -> DevicePlan:
        plan = of(*args)
        steps.append((launched.copy(), plan))
        launched.clear()
        return plan

    monkeypatch.setattr(Replayed, "replay", alone)
    monkeypatch.setattr(DevicePlan, "of", planned)
    complete(engine, random_prompts(20, 5, 9), SamplingParams(max_tokens=7, **ENDLESS), compact=True)
    before = [names for names, _ in steps[1:]] + [launched]
    groups, seen = len(runner._tokens), set()
    for (_, plan), names in zip(steps, before, strict=True):
        at, end = names.index("("), names.index(")")
        moves, many = sum(op.destination is not None for op in plan.pages), len(plan.index) > writes
        assert names[:at] == ["copy_pages"] * moves + ["scatter"] * many
        assert names[at + 1 : at + 2 + groups] == ["scatter"] + ["translate"] * groups
        assert names[end + 1 :] in ([[]] if plan.decode else [[], ["scatter"]]), "what was drawn goes to its rows"
        seen.add((plan.decode, many))
    assert (True, False) in seen
    assert ((False, True) in seen) == (writes == 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured here")
def test_every_byte_that_a_graph_reads_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in host and device buffers before: no place keeps any of it."""
    monkeypatch.setattr(DeviceBatch, "run", blind)
    engine = served(monkeypatch, tiny("gemma3_text", **GEMMA))
    runner = engine.executor
    assert isinstance(runner, DeviceRunner)
    uploaded, checked = Packer.upload, set()

    def twice(packer: Packer, sections: Any, layout: Layout | None = None) -> Any:
        if packer is not runner._packer or layout is None:
            return uploaded(packer, sections, layout)
        found = []
        for garbage in (0x55, 0xAA):
            packer._fixed.bytes.fill_(garbage)
            for staging in packer._ring:
                staging.array[:] = garbage
            views = uploaded(packer, sections, layout)
            found.append(packer._fixed.bytes.clone())
        for name, (at, room) in layout.places.items():
            assert torch.equal(*(buffer[at : at + room] for buffer in found)), name
        checked.add(id(layout))
        return views

    monkeypatch.setattr(Packer, "upload", twice)
    prompts = random_prompts(37, 1, 23)
    complete(engine, prompts, SamplingParams(max_tokens=6, **ENDLESS), compact=True)
    alone = {size for (alone, size), layout in runner._places.items() if alone and id(layout) in checked}
    assert alone
    assert len(checked) > len(alone), "steps with chunks too"


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
    runner = device_runner.DeviceRunner(
        model, layout, arena, ids, rows, 24, 64, (), graphs=sizes, poison=True, early=True
    )
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
    monkeypatch.setattr(device_runner, "_WRITES", 3)
    model = tiny("gemma3_text", **GEMMA)
    prompts, limits = random_prompts(9, 20), (14, 4)
    expected = [reference(model, prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    engine = served(monkeypatch, model)
    asked = [(prompt, SamplingParams(max_tokens=n, **ENDLESS)) for prompt, n in zip(prompts, limits, strict=True)]
    assert [output.outputs[0].token_ids for output in serve(engine, asked)] == expected


@pytest.mark.parametrize("most", [1, 4, 20, 256, 8192])
def test_sizes_ascend_and_reach_the_most(most: int) -> None:
    for sizes in (lane_counts(most), token_counts(most)):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] >= most
    assert lane_counts(most)[0] == 1, "who decodes alone waits for no row of padding"
    assert all(n % 8 == 0 for n in token_counts(most))
