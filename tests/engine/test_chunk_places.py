"""Steps with chunks of states at fixed places: every token is somebody's once, and padding is nobody's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from isthmus.engine import device_runner
from isthmus.engine.chunk_places import ChunkPlaces
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.device_plan import StatePlan
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import lane_counts, token_counts
from isthmus.memory import Pool
from isthmus.model.compile import prepare
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import ENDLESS, LONGEST, ROWS, random_prompts, serve
from tests.engine.test_device_states import small
from tests.engine.test_graph_inputs import Replayed
from tests.engine.toy_tokenizers import byte_level
from tests.model.harness import paged, reference

NULL, BUDGET = 77, 12
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured there")


def plan_of(counts: list[int]) -> StatePlan:
    start = np.cumsum([0, *counts]).astype(np.int64)
    entries = np.arange(100, 100 + len(counts), dtype=np.int32)
    return StatePlan(entries, NULL, np.arange(len(counts)) % 2 == 0, start)


@pytest.mark.parametrize(
    "counts", [[], [1], [5], [63], [1, 1, 1], [64, 1, 2], [1, 130, 1, 65, 2], [2] * 4, [200], [1, 190, 1]]
)
@pytest.mark.parametrize("tokens", [256, 320])
def test_what_a_graph_reads(counts: list[int], tokens: int) -> None:
    places, plan = ChunkPlaces.of(tokens, 6), plan_of(counts)
    assert places.hold(plan)
    found = {name.removeprefix("states."): array for name, array in places.arrays(plan).items()}
    assert {f"states.{name}": array.nbytes for name, array in found.items()} == places.sizes()
    live, sequences = sum(counts), len(counts)
    owner = found["owner"]
    assert owner[:live].tolist() == [s for s, n in enumerate(counts) for _ in range(n)]
    assert (found["entry"][owner[live:]] == NULL).all()
    assert found["fresh"][owner[live:]].all()
    for s in range(places.sequences):
        mine = np.flatnonzero(owner == s)
        if len(mine):
            assert (found["starts"][s], found["ends"][s]) == (mine[0], mine[-1])
        else:  # nobody's, and writes where nobody reads
            assert found["entry"][s] == NULL
            assert found["starts"][s] == found["ends"][s] == tokens - 1
    for name, wanted in (("decodes", plan.decodes), ("chunks", plan.chunks)):
        assert found[name][: len(wanted)].tolist() == wanted.tolist()
        assert (found[name][len(wanted) :] >= sequences).all()
    assert sequences in found["chunks"], "padding's outputs are numbers, too"


def test_steps_that_no_graph_holds() -> None:
    places = ChunkPlaces.of(64, 8)
    assert not places.hold(plan_of([64])), "no token is left for padding"
    assert not places.hold(plan_of([1] * 9))
    assert places.hold(plan_of([2, 2, 2]))
    assert not places.hold(plan_of([2, 2, 2, 2])), "many short chunks are launched"


def graphed(model: PreTrainedModel, dtype: str, device: str, *, graphs: bool = True) -> Engine:
    """An engine whose steps go through graphs, those with chunks too."""
    twin = paged(model).to(getattr(torch, dtype)).requires_grad_(False).to(device)
    layout = derive(twin, 4, dtype)
    prepare(twin, compiled=False)
    pool, sizes = Pool(1 << 21, layout.groups), {True: lane_counts(ROWS), False: token_counts(BUDGET + 1)}
    arena = torch.empty(pool.arena_bytes, dtype=torch.uint8, device=device)
    runner = DeviceRunner(
        twin, layout, arena, pool.capacities, ROWS, BUDGET, LONGEST, (), graphs=sizes if graphs else {}, poison=True
    )
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=BUDGET)
    return Engine(
        pool, runner, byte_level(), config, max_model_len=LONGEST, vocab_size=layout.vocab_size, eos_token_ids=()
    )


def answers(engine: Engine, prompts: list[list[int]], news: tuple[int, ...]) -> list[list[int]]:
    """Greedy; pages move after every step, and one sequence is preempted."""

    def disturb(steps: int) -> None:
        engine.pool.compact()
        engine.pool.check()
        if steps == 4:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    asked = [(p, SamplingParams(max_tokens=n, **ENDLESS)) for p, n in zip(prompts, news, strict=True)]
    return [output.outputs[0].token_ids for output in serve(engine, asked, disturb)]


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of graphs that steps with chunks replay from now on."""
    runner, sizes = engine.executor, list[int]()
    assert isinstance(runner, DeviceRunner)
    assert runner._mixed is not None
    replay = runner._mixed.replay

    def replay_and_count(size: int) -> Any:
        sizes.append(size)
        return replay(size)

    monkeypatch.setattr(runner._mixed, "replay", replay_and_count)
    return sizes


FIXED = [
    *(pytest.param("cpu", name, marks=INTERPRETED) for name in ("bamba", "minimax", "lfm2")),
    pytest.param("cuda", "bamba", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "family"), FIXED)
def test_tokens_are_transformers(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps over fixed places, smaller ones after larger ones, in a poisoned arena."""
    if device == "cpu":
        monkeypatch.setattr(device_runner, "Graphs", Replayed)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    model = small(family)
    prompts, news = random_prompts(11, 1, 5, 9), (3, 4, 6, 3)
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    engine = graphed(model, "float32", device)
    sizes = counted(engine, monkeypatch)
    assert answers(engine, prompts, news) == expected
    assert len(set(sizes)) > 1, "steps of several sizes went through graphs"
    assert isinstance(engine.executor, DeviceRunner)
    assert engine.executor.chunks_in_graphs


@pytest.mark.parametrize("family", ["jamba", "qwen3_5"])
def test_what_takes_as_many_launches_as_tokens_stays_out_of_graphs(family: str) -> None:
    """It is known when a step with chunks has run."""
    engine = graphed(small(family), "float32", "cpu", graphs=False)
    assert isinstance(engine.executor, DeviceRunner)
    assert engine.executor.chunks_in_graphs
    serve(engine, [(random_prompts(5)[0], SamplingParams(max_tokens=1, **ENDLESS))], lambda steps: None)
    assert not engine.executor.chunks_in_graphs
