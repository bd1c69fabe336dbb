"""The GPU's executor serves models with states, latent rows, relative scores and chunked windows: their tokens are
Transformers' own. Through Triton's interpreter here, compiled and in graphs on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from isthmus.engine import device_runner
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.device_plan import DevicePlan
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.gpu_backend import warm_steps
from isthmus.engine.graphs import Inputs, lane_counts, token_counts
from isthmus.memory import Pool
from isthmus.model import device_states
from isthmus.model.compile import prepare
from isthmus.model.device_attention import TAG
from isthmus.model.device_states import StateInputs
from isthmus.model.layout import derive
from isthmus.model.mixers import mixers
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import ENDLESS, LONGEST, ROWS, in_use, random_prompts, serve
from tests.engine.test_graph_inputs import Replayed
from tests.engine.toy_tokenizers import byte_level
from tests.model.families import config_of
from tests.model.harness import paged, reference, tiny

S, F, L = "sliding_attention", "full_attention", "linear_attention"
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"layer_types": [L, F]},
    "kimi_linear": {"layer_types": [L, F]},
    "inkling": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "lfm2": {"layer_types": ["conv", F]},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "jamba": {"num_hidden_layers": 2, "num_experts": 1},
    "minimax": {"layer_types": [L, F], "num_local_experts": 1, "num_experts_per_tok": 1},
    "deepseek_v3": {"num_hidden_layers": 1},
    "llama4": {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 3},
}
"""One of every sort of state and of attention, with as few layers as show it."""

STATES = [name for name in LAYERS if name not in ("deepseek_v3", "llama4")]
EXPERTS = ("kimi_linear", "inkling", "deepseek_v3", "minimax")
"""In float32 Transformers' experts read their loads back to the host, which no graph can hold."""


def small(family: str) -> PreTrainedModel:
    """A family with few layers."""
    model_type, values = config_of(family)
    values = values | LAYERS[family]
    if "layer_types" in values:
        values["num_hidden_layers"] = len(values["layer_types"])
    return tiny(model_type, **values)


def engine_on(
    device: str,
    model: PreTrainedModel,
    *,
    budget: int = 16,
    graphs: bool = False,
    arena_bytes: int = 1 << 19,
    prefix_caching: bool = False,
) -> Engine:
    """An engine over a poisoned arena; as `isthmus.engine.gpu_backend` makes one."""
    twin = paged(model).requires_grad_(False).to(device)
    layout = derive(twin, 4, "float32")
    prepare(twin, compiled=graphs and device == "cuda")
    pool = Pool(arena_bytes, layout.groups)
    sizes = {True: lane_counts(ROWS)} if graphs else {}
    if graphs and not any(group.kind == "state" for group in layout.groups):
        sizes[False] = token_counts(budget)
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
    runner = DeviceRunner(
        twin, layout, arena, pool.capacities, ROWS, budget, LONGEST, (), graphs=sizes, poison=True, early=True,
    )  # fmt: skip
    return Engine(
        pool,
        runner,
        byte_level(),
        SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=budget),
        max_model_len=LONGEST,
        vocab_size=layout.vocab_size,
        eos_token_ids=(),
        prefix_caching=prefix_caching,
    )


def replayed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where there is no GPU: the forward again over fixed inputs, in the place of graphs."""
    if device == "cpu":
        monkeypatch.setattr(device_runner, "Graphs", Replayed)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


@pytest.mark.parametrize("family", LAYERS)
def test_tokens_are_transformers(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and decodes mixed, one step ahead, preempted, pages moved; smaller graphs after larger ones."""
    replayed(monkeypatch, device)
    model = small(family)
    prompts = random_prompts(11, 1, 5)
    news = (3, 4, 6)  # they end one after the other: batches become smaller
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    assert all(len(set(tokens)) >= 3 for tokens in expected), "degenerate tokens prove nothing"
    engine = engine_on(device, model, budget=8, graphs=device == "cpu" or family not in EXPERTS)

    def disturb(steps: int) -> None:
        engine.pool.compact()
        if steps == 4:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    asked = [(p, SamplingParams(max_tokens=n, **ENDLESS)) for p, n in zip(prompts, news, strict=True)]
    outputs = serve(engine, asked, disturb)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("family", ["qwen3_5", "inkling"])
def test_states_move_and_are_come_back_to(device: str, family: str) -> None:
    """Snapshots at a prompt's last full page, copied to whoever goes on from there; every hole is closed at once."""
    model = small(family)
    (prompt,) = random_prompts(14)
    other = [*prompt[:12], 9, 8, 7]
    expected = [reference(model, tokens, 3) for tokens in (prompt, other)]
    params = SamplingParams(max_tokens=3, **ENDLESS)
    engine = engine_on(device, model, prefix_caching=True)
    compact = lambda _: engine.pool.compact()  # noqa: E731
    (first,) = serve(engine, [(prompt, params)], compact)
    again = serve(engine, [(prompt, params), (other, params)], compact)
    assert [output.num_cached_tokens for output in again] == [12, 12]
    assert [output.outputs[0].token_ids for output in (first, *again)] == [expected[0], *expected]
    assert engine.pool.moved_pages["state"] > 0
    assert in_use(engine) == 0


class _NoLook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on operators that wait for what a device computes; the CPU tensors that name a layer are not among it."""

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "item", "equal")

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].partition(".")[0]
        if name in self.LOOKS and not (args[0].dim() == 0 and args[0].data_ptr() in self.known):
            raise AssertionError(f"{func} in a forward that a graph has to hold")
        if name in ("index", "index_put", "index_put_"):
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
            assert not masks, "a mask as an index: how many rows there are only the device knows"
        if func.name() == "isthmus::state":  # opaque to a mode, too
            with self:
                return device_states._state(*args)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a capture says so")
@pytest.mark.parametrize("family", STATES)
def test_no_decode_looks_at_the_host(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph of decodes runs, padding lanes and all, with nothing but fixed tensors."""
    replayed(monkeypatch, "cpu")
    engine = engine_on("cpu", small(family), graphs=True)
    runner = engine.executor
    assert isinstance(runner, DeviceRunner)
    tags = [module for module in runner.model.modules() if hasattr(module, TAG)]
    known = {getattr(module, TAG).data_ptr() for module in tags}
    known |= {runner._batch.handle.data_ptr(), runner._states.handle.data_ptr()}
    experts = [module for module in runner.model.modules() if type(module).__name__.endswith("Experts")]
    for module in experts:  # of which the loads are looked at, in float32
        monkeypatch.setattr(module, "forward", lambda hidden, *args, **named: torch.zeros_like(hidden))
    step = warm_steps(1, 1, 16)[2]  # one sequence, with the null page
    plan = DevicePlan.of(step, runner.layout.groups, runner._tables, runner._grains)
    with torch.inference_mode():
        inputs: Inputs = runner._inputs(True, ROWS)
        runner._upload(plan.padded(ROWS), ROWS, runner._places[True, ROWS])
        with _NoLook(known):
            outputs = runner._decode(inputs)
    assert outputs.logits[1:].isfinite().all(), "padding lanes must hold numbers: other layers compute with them"


SIZES = [(3, 64, 128), (256, 8192, 4096), (40, 64, 128), (3, 64, 9)]


@pytest.mark.parametrize(("sequences", "tokens", "longest"), SIZES)
def test_a_warm_step_has_most_chunks_and_tokens(sequences: int, tokens: int, longest: int) -> None:
    """Memory of a step grows with both."""
    counts = [np.diff(step.query_start) for step in warm_steps(sequences, tokens, longest)]
    most = min(sequences, tokens // 2)
    assert max(n.sum() for n in counts if len(n) == most and n.min() > 1) > min(tokens - most, (longest - 2) * most)
    assert max(n.max() for n in counts) < longest


def test_the_warm_steps_run_over_null_pages(device: str) -> None:
    """What is measured at the start: chunks and decodes of nobody, more tokens than states have pages."""
    twin = paged(small("qwen3_5")).requires_grad_(False).to(device)
    layout = derive(twin, 4, "float32")
    prepare(twin, compiled=False)
    bytes_ = 2 * max(group.spec.page_bytes for group in layout.groups)
    arena = torch.zeros(bytes_ // 16 * 16, dtype=torch.uint8, device=device)
    runner = DeviceRunner(twin, layout, arena, {"tokens": 1, "states": 1}, 3, 8, 16, (), graphs={}, early=True)
    runner.warm_pages()
    for step in warm_steps(3, 8, 16):
        runner.run(step)


def test_a_layer_is_told_its_number_and_its_executor() -> None:
    """Both travel as tensors, so that layers and executors can share what was compiled."""
    twin = paged(small("inkling"))
    derive(twin, 4, "float32")
    prepare(twin, compiled=False)
    numbers: list[Tensor] = [getattr(mixer.module, TAG) for mixer in mixers(twin)]
    assert [int(number) for number in numbers] == [0] * 4 + [1] * 4
    assert all(number.device.type == "cpu" for number in numbers)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("chunks", [0, 1])
def test_kernels_begin_early_where_all_they_read_at_once_is_there(wanted: bool, chunks: int) -> None:
    """With chunks in the step, what says where its decodes are is written between two kernels of a layer."""
    three = torch.arange(3)
    inputs = StateInputs(np.arange(4), three.int(), three > 0, three, three, three[chunks:], three[:chunks], three)
    assert inputs.step(torch.ones(3, dtype=torch.int32), early=wanted).early is (wanted and not chunks)
