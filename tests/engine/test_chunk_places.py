"""Steps with chunks of states at fixed places: every token is somebody's once, and padding is nobody's."""

from __future__ import annotations

import itertools
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
from isthmus.kernels import fla_chunks
from isthmus.kernels.fla_chunks import CHUNK
from isthmus.memory import Pool
from isthmus.model import device_states
from isthmus.model.compile import prepare
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import ENDLESS, LONGEST, ROWS, random_prompts, serve
from tests.engine.test_device_states import small
from tests.engine.test_graph_inputs import Replayed
from tests.engine.toy_tokenizers import byte_level
from tests.kernels.library import stand_ins
from tests.model.families import config_of
from tests.model.harness import paged, reference, tiny

NULL = 77
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


@pytest.mark.parametrize("counts", [[], [1], [5], [64, 1, 2], [1, 130, 1, 65, 2], [2] * 4, [200], [1, 190, 1]])
def test_what_a_library_reads(counts: list[int]) -> None:
    places, plan = ChunkPlaces.of(256, 6), plan_of(counts)
    arrays = places.arrays(plan)
    chunks, bounds, tokens, sequences = (
        arrays[f"states.packed.{name}"] for name in ("chunks", "bounds", "tokens", "sequences")
    )
    several = [s for s, n in enumerate(counts) if n > 1]
    assert (np.diff(bounds) >= 0).all()
    assert bounds[-1] == len(tokens) == places.tokens
    seen: list[int] = []
    for member, s in enumerate(sequences):
        mine = tokens[bounds[member] : bounds[member + 1]].tolist()
        if member < len(several):
            assert s == several[member]
            assert mine == list(range(plan.query_start[s], plan.query_start[s + 1]))
        else:
            assert arrays["states.entry"][s] == NULL
            assert all(token >= sum(counts) for token in mine)
        seen += mine
    decodes = set(plan.query_start[:-1][plan.decodes].tolist())
    assert set(seen) == set(range(places.tokens)) - decodes
    ranks = [-(-(end - begin) // CHUNK) for begin, end in itertools.pairwise(bounds)]
    real = [[member, rank] for member, n in enumerate(ranks) for rank in range(n)]
    assert chunks[: len(real)].tolist() == real
    assert all(rank >= ranks[member] for member, rank in chunks[len(real) :])


def test_steps_that_no_graph_holds() -> None:
    places = ChunkPlaces.of(64, 8)
    assert not places.hold(plan_of([64])), "no token is left for padding"
    assert not places.hold(plan_of([1] * 9))
    assert places.hold(plan_of([2, 2, 2]))
    assert not places.hold(plan_of([2, 2, 2, 2])), "many short chunks are launched"


def graphed(model: PreTrainedModel, dtype: str, device: str, *, mixed: bool = True, budget: int = 12) -> Engine:
    """An engine whose steps with chunks go through graphs, if they are `mixed`."""
    twin = paged(model).to(getattr(torch, dtype)).requires_grad_(False).to(device)
    layout = derive(twin, 4, dtype)
    prepare(twin, compiled=False)
    pool, sizes = Pool(1 << 21, layout.groups), {True: lane_counts(ROWS)}
    if mixed:
        sizes[False] = token_counts(budget + 1)
    arena = torch.empty(pool.arena_bytes, dtype=torch.uint8, device=device)
    runner = DeviceRunner(
        twin, layout, arena, pool.capacities, ROWS, budget, LONGEST, (), graphs=sizes, poison=True, state_chunks="auto"
    )
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=budget)
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
    *(pytest.param("cpu", name, marks=INTERPRETED) for name in ("bamba", "minimax", "qwen3_5", "kimi_linear")),
    pytest.param("cuda", "bamba", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "family"), FIXED)
def test_tokens_are_transformers(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps over fixed places, smaller ones after larger ones, in a poisoned arena."""
    if device == "cpu":
        monkeypatch.setattr(device_runner, "Graphs", Replayed)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(device_states, "OPERATIONS", device_states.LIBRARY)
        monkeypatch.setattr(fla_chunks, "forwards", stand_ins)
        monkeypatch.setattr(fla_chunks, "DTYPES", (torch.float32,))
    model = small(family)
    prompts, news = random_prompts(11, 1, 5, 9), (3, 4, 6, 3)
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    engine = graphed(model, "float32", device)
    sizes = counted(engine, monkeypatch)
    assert answers(engine, prompts, news) == expected
    assert len(set(sizes)) > 1, "steps of several sizes went through graphs"
    assert isinstance(engine.executor, DeviceRunner)
    assert engine.executor.chunks_in_graphs


@pytest.mark.gpu
def test_a_library_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16, by fla-core: the first tokens are those of steps that are launched, but for a near tie at most."""
    if fla_chunks.version() is None:
        pytest.skip("fla-core is not installed: pip install 'isthmus[fla]'")
    model_type, values = config_of("qwen3_5")
    sizes_of = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = tiny(model_type, **values | sizes_of)
    prompts, news = random_prompts(11, 40, 5, 90, 64, 100), (4,) * 6
    launched = answers(graphed(model, "bfloat16", "cuda", mixed=False, budget=200), prompts, news)
    engine = graphed(model, "bfloat16", "cuda", budget=200)
    sizes = counted(engine, monkeypatch)
    replayed = answers(engine, prompts, news)
    assert len(set(sizes)) > 1
    assert sum(a[0] == b[0] for a, b in zip(launched, replayed, strict=True)) >= 5


def test_only_fixed_launches_go_into_graphs() -> None:
    """By name and by what is given: Mamba-1 and RG-LRU scan in torch, and so do the delta rules without a library."""
    fixed = {name for name, operation in device_states.OPERATIONS.items() if operation.fixed([None] * 6)}
    assert fixed == {"causal_conv", "ssd", "lightning_attention"}
    given = [torch.zeros(1, 1, 4, 4), *(torch.zeros(3, 1, 4, dtype=torch.bfloat16) for _ in range(3)), None, None]
    assert device_states.LIBRARY["gated_delta_rule"].fixed(given)
    given[1] = torch.zeros(3, 1, 4)
    assert not device_states.LIBRARY["gated_delta_rule"].fixed(given)
