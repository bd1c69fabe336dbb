"""Steps with chunks of states at fixed places: every token is somebody's once, and padding is nobody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.engine.chunk_places import ChunkPlaces
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.device_plan import StatePlan
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.gpu_backend import GpuBackend
from isthmus.engine.graphs import lane_counts, token_counts
from isthmus.engine.output import CompletionOutput
from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.kda import kimi_delta_rule
from isthmus.kernels.states import StateStep
from isthmus.memory import Pool
from isthmus.model import device_states
from isthmus.model.compile import prepare
from isthmus.model.device_states import StateInputs
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import ENDLESS, LONGEST, ROWS, random_prompts, serve
from tests.engine.test_device_states import LAYERS, replayed, small
from tests.engine.toy_tokenizers import byte_level
from tests.model.device_serving import require
from tests.model.harness import paged, reference, tiny

NULL, BUDGET = 77, 12
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are captured there")


def plan_of(counts: list[int]) -> StatePlan:
    start = np.cumsum([0, *counts]).astype(np.int64)
    entries = np.arange(100, 100 + len(counts), dtype=np.int32)
    return StatePlan(entries, NULL, np.arange(len(counts)) % 2 == 0, start)


@pytest.mark.parametrize(
    "counts", [[], [1], [5], [63], [1, 1, 1], [64, 1, 2], [1, 130, 1, 65, 2], [2] * 4, [200], [1, 190, 1], [2] * 6]
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
        others = found[name][len(wanted) :].tolist()
        assert min(others, default=sequences) >= sequences
        assert others.count(sequences) == (name == "chunks"), "padding is walked through once"


PROMPTS = {
    "cut at their last full pages": [496, 16] * 15 + [496],
    "tails alone": [16] * 16,
    "long, and decodes": [8092] + [1] * 100,
    "short": [112, 16] * 63,
    "one short, and decodes": [96, 4] + [1] * 100,
}


@pytest.mark.parametrize("counts", PROMPTS.values(), ids=PROMPTS)
def test_usual_steps_are_held(counts: list[int]) -> None:
    size = next(n for n in (*token_counts(8192), 8200) if n > sum(counts))
    assert ChunkPlaces.of(size, 256).hold(plan_of(counts))


def test_steps_that_no_graph_holds() -> None:
    places = ChunkPlaces.of(64, 8)
    assert not places.hold(plan_of([64])), "no token is left for padding"
    assert not places.hold(plan_of([1] * 9))
    assert places.hold(plan_of([2] * 8))
    places = ChunkPlaces.of(64, 40)
    assert places.hold(plan_of([2] * 16))
    assert not places.hold(plan_of([2] * 17)), "many short chunks are launched"


def graphed(
    model: PreTrainedModel, dtype: str, device: str, *, graphs: bool = True, budget: int = BUDGET, rows: int = ROWS
) -> Engine:
    """An engine whose steps go through graphs, those with chunks too."""
    twin = paged(model).to(getattr(torch, dtype)).requires_grad_(False).to(device)
    layout = derive(twin, 4, dtype)
    prepare(twin, compiled=False)
    pool, sizes = Pool(1 << 25, layout.groups), {True: lane_counts(rows), False: token_counts(budget + 1)}
    arena = torch.empty(pool.arena_bytes, dtype=torch.uint8, device=device)
    runner = DeviceRunner(
        twin,
        layout,
        arena,
        pool.capacities,
        rows,
        budget,
        LONGEST,
        (),
        graphs=sizes if graphs else {},
        poison=True,
        early=True,
    )
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget)
    return Engine(
        pool, runner, byte_level(), config, max_model_len=LONGEST, vocab_size=layout.vocab_size, eos_token_ids=()
    )


@INTERPRETED
def test_a_step_takes_the_next_graph_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """But none of more than twice its tokens."""
    replayed(monkeypatch, "cpu")
    runner = graphed(small("lfm2"), "float32", "cpu", budget=150, rows=40).executor
    assert isinstance(runner, DeviceRunner)

    def graph_of(counts: list[int]) -> int | None:
        plan: Any = SimpleNamespace(tokens=np.zeros(sum(counts), np.int32), states=plan_of(counts))
        return runner._graph_of(plan)

    assert graph_of([30, 1]) == 32
    assert graph_of([31, 1]) == 64, "a token is padding's"
    assert graph_of([2] * 16) == 64
    assert graph_of([2] * 17) is None
    assert graph_of([7] * 17) == 128
    assert graph_of([150]) == 160
    assert graph_of([160]) is None


@pytest.mark.parametrize("most", [8, 100, 150, 2048, 8192])
@pytest.mark.parametrize("states", [False, True])
def test_sizes_of_graphs(most: int, states: bool) -> None:
    """Each is a multiple of eight, every step finds one; padding is at most as much again in small steps."""
    config = SimpleNamespace(scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=most))
    backend: Any = SimpleNamespace(_config=config, _chunks_in_graphs=True, _has_states=states, _exact=0)
    sizes = GpuBackend._sizes(backend)[False]
    assert list(sizes) == sorted(set(sizes))
    assert all(n % 8 == 0 for n in sizes)
    for tokens in range(8, most + 1):
        size = next(n for n in sizes if n >= tokens + states)
        assert size - tokens - states < max(8, tokens if tokens < 128 else tokens / 4)


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
    *(pytest.param("cpu", name, marks=INTERPRETED) for name in ("bamba", "minimax", "lfm2", "qwen3_5", "kimi_linear")),
    *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("bamba", "qwen3_5")),
]


@pytest.mark.parametrize(("device", "family"), FIXED)
def test_tokens_are_transformers(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps over fixed places, smaller ones after larger ones, in a poisoned arena."""
    replayed(monkeypatch, device)
    model = small(family)
    prompts, news = random_prompts(11, 1, 5, 9), (3, 4, 6, 3)
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    engine = graphed(model, "float32", device)
    sizes = counted(engine, monkeypatch)
    assert answers(engine, prompts, news) == expected
    assert len(set(sizes)) > 1, "steps of several sizes went through graphs"
    assert isinstance(engine.executor, DeviceRunner)
    assert engine.executor.chunks_in_graphs


def captured(device: str, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same launches again, whatever the host would do now."""
    if device == "cpu":
        return forward
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = forward()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


RULES = {"gated_delta_rule": gated_delta_rule, "kimi_delta_rule": kimi_delta_rule}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Error over size: queries and keys are rounded at unit length, and so is what a chunk's tokens write."""


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_capture_computes_any_chunks(device: str, name: str, dtype: torch.dtype) -> None:
    """Of a delta rule: steps of unlike lengths in the same places, over pages that are NaN wherever nobody owns them;
    their outputs and states are the rule's, and of padding there are only numbers."""
    key_heads, heads, k_dim, v_dim = (1, 2, 12, 20) if device == "cpu" else (2, 4, 64, 128)
    places, draw = ChunkPlaces.of(256, 70), torch.Generator().manual_seed(0)
    view = torch.full((80, heads, k_dim, v_dim), torch.nan, device=device)

    def drawn() -> list[Tensor]:
        shapes = ((key_heads, k_dim), (key_heads, k_dim), (heads, v_dim), (heads,))
        query, key, value, beta = (torch.randn(256, *shape, generator=draw).to(dtype) for shape in shapes)
        channels = (k_dim,) if name == "kimi_delta_rule" else ()
        decay = -0.2 * torch.rand(256, heads, *channels, generator=draw)
        return [x.to(device) for x in (query, key, value, decay, beta.sigmoid())]

    views = {n: torch.from_numpy(array).to(device) for n, array in places.arrays(StatePlan.empty(0)).items()}
    tables, given = torch.arange(80, dtype=torch.int32, device=device), drawn()
    read = ("entry", "fresh", "starts", "ends", "decodes", "chunks", "owner")
    inputs = StateInputs(np.zeros(0, np.int64), *(views[f"states.{n}"] for n in read))
    run = device_states.OPERATIONS[name].run
    with torch.inference_mode(), uninitialized_is_nan():
        forward = captured(device, lambda: run(inputs.step(tables, early=False), view, *given))
        for counts in ALIKE:
            start, pages = np.cumsum([0, *counts]).astype(np.int64), np.arange(len(counts), 0, -1)
            past = np.arange(len(counts)) % 2
            view.fill_(torch.nan)
            known = pages[past > 0]
            view[known] = torch.randn(len(known), *view.shape[1:], generator=draw).to(device)
            for place, new in zip(given, drawn(), strict=True):
                place.copy_(new)
            for n, array in places.arrays(StatePlan(pages.astype(np.int32), 0, past == 0, start)).items():
                views[n].copy_(torch.from_numpy(array))
            right, live = view.to("cpu", copy=True), sum(counts)
            expected = RULES[name](StateStep.of(start, past, pages), right, *(x[:live].cpu() for x in given))
            out = forward()
            assert error(out[:live], expected) < TOLERANCE[dtype], counts
            assert error(view[pages], right[pages]) < TOLERANCE[dtype], counts
            assert out[live:].isfinite().all(), counts
            assert view[[0, *range(len(counts) + 1, 80)]].isnan().all(), counts


ALIKE = [
    *([255], [1, 130, 1, 65, 2], [2] * 4, [1, 190], [1, 1], [64, 1, 2], [128, 64, 63], [5]),
    [190, *[1] * 65],  # the last block has decodes alone, and one token of padding
]


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """What is allocated holds NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(given: Tensor, expected: Tensor) -> float:
    return float((given.cpu().float() - expected.float()).norm() / expected.float().norm())


NEAR = {"bfloat16": 0.25, "float32": 1e-3}
"""Log-probabilities of one step and of the same padded to another size differ by less: products of matrices sum in
another order. A token that is chosen by less may be another one; what reads a wrong state is off by more."""


HEADS = {
    "qwen3_5": {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
    "kimi_linear": {"linear_head_dim": 128, "linear_num_heads": 16},
}


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("dtype", NEAR)
def test_steps_in_graphs_are_those_that_are_launched(
    device: str, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and their log-probabilities, of chunks of unlike lengths mixed with decodes."""
    replayed(monkeypatch, device)
    model_type, values = require(family)
    values = values | LAYERS[family] | {"num_hidden_layers": 2}
    if family == "kimi_linear":
        values["mlp_layer_types"] = ["dense", "dense"]
    lengths, news, budget, rows = [11, 1, 5, 9, 14], [3, 4, 6, 3, 3], 12, ROWS
    if device == "cuda":
        values |= HEADS[family]
        lengths, news = [11, 40, 5, 90, 64, 100, 1, 2, 17, 77], [4, 9, 6, 3, 8, 5, 7, 4, 6, 3]
        budget, rows = 200, 8
    model, prompts = tiny(model_type, **values), random_prompts(*lengths)
    asked = [(p, SamplingParams(max_tokens=n, logprobs=2, **ENDLESS)) for p, n in zip(prompts, news, strict=True)]
    launched = serve(graphed(model, dtype, device, graphs=False, budget=budget, rows=rows), asked)
    engine = graphed(model, dtype, device, budget=budget, rows=rows)
    sizes = counted(engine, monkeypatch)
    in_graphs = serve(engine, asked)
    assert len(set(sizes)) > 1, "steps of several sizes went through graphs"
    assert isinstance(engine.executor, DeviceRunner)
    assert engine.executor.chunks_in_graphs
    pairs = zip(launched, in_graphs, strict=True)
    compared = sum(same_until_undecided(one.outputs[0], other.outputs[0], NEAR[dtype]) for one, other in pairs)
    assert compared > sum(news) // 2, "too few were decided to prove anything"


def same_until_undecided(one: CompletionOutput, other: CompletionOutput, near: float) -> int:
    """How many tokens were compared: up to where one was hardly likelier than the next, and the other took that."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    for i, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        (best, second), token = sorted((x.logprob for x in ours.values()), reverse=True)[:2], other.token_ids[i]
        if one.token_ids[i] != token:
            assert best - second < near
            return i
        assert abs(ours[token].logprob - theirs[token].logprob) < near
    return len(one.logprobs)


def test_what_takes_as_many_launches_as_tokens_stays_out_of_graphs() -> None:
    """It is known when a step with chunks has run."""
    engine = graphed(small("jamba"), "float32", "cpu", graphs=False)
    assert isinstance(engine.executor, DeviceRunner)
    assert engine.executor.chunks_in_graphs
    serve(engine, [(random_prompts(5)[0], SamplingParams(max_tokens=1, **ENDLESS))], lambda steps: None)
    assert not engine.executor.chunks_in_graphs


@pytest.mark.parametrize("names", [("fixed", "other"), ("other", "fixed")], ids="-".join)
def test_one_operation_that_is_not_fixed_keeps_all_of_them_out_of_graphs(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes last."""
    made = {name: device_states.Operation(lambda step, x: x, 0, 0, fixed=name == "fixed") for name in names}
    monkeypatch.setattr(device_states, "OPERATIONS", made)
    states = device_states.DeviceStates({0: {}})
    for name in names:
        states.run(name, 0, [""], [torch.zeros(1)], {})
    assert not states.chunks_in_graphs
