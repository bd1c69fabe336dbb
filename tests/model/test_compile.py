"""Decoder layers of every family compile to one graph each, shared by layers of a class, and compute the same.

What attention itself does on a device is opaque to the compiler, so plain causal attention stands for it here, and so
are operations on states, which are computed of one sequence that begins; the families' own code around them is what
has to trace, under `prepare`'s own options and another backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from isthmus.kernels.attention import Workspace
from isthmus.kernels.reference import Scoring
from isthmus.model import linear
from isthmus.model.compile import prepare
from isthmus.model.device_attention import DeviceBatch
from isthmus.model.device_states import DeviceStates
from isthmus.model.layout import ModelLayout, derive
from isthmus.model.mixers import mixers
from isthmus.model.state_batch import state_views
from tests.kernels.lanes import device_step
from tests.model.families import ATTENTION, FAMILIES
from tests.model.harness import paged, tiny

LENGTHS = (2, 5, 33)
FARTHER = ("gemma3", "gemma2", "gemma4-e2b", "gpt_oss", "minimax")
"""Families that go all the way to code generation (which takes minutes on a CPU): seconds each, so one of a sort."""

SOME = ("minimax", "llama4", "youtu")
"""A recurrence, chunked windows, latent rows: the quickest of each sort."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.0}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


class Causal(DeviceBatch):
    """Attention over the step's own tokens alone. A layer that shares its rows reads those of their owner."""

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__(layout.layer_group, layout.owner, {}, Workspace.of(0, 0, 0, "cpu"), early=True)
        self._windows = {group.name: group.window for group in layout.groups}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.called: list[int] = []  # layers, in order
        self.states = Begins(layout)

    def run(self, query: Tensor, key: Tensor, value: Tensor, layer: int, how: Scoring) -> Tensor:
        self.called.append(layer)
        if self._owner[layer] == layer:
            self._rows[layer] = key.clone(), value.clone()
        key, value = self._rows[self._owner[layer]]
        n, heads = query.shape[:2]
        scores = torch.einsum("qhd,khd->hqk", query, _repeat(key, heads)).float() * how.scaling
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        window = self._windows[self._layer_group[layer]] or n
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
        if how.sinks is not None:
            scores = torch.cat((scores, how.sinks.float()[:, None, None].expand(heads, n, 1)), -1)
        weights = scores.softmax(-1)[..., :n].to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, _repeat(value, heads)).contiguous()


def _repeat(rows: Tensor, heads: int) -> Tensor:
    """A copy of each key head for every query head that reads it."""
    return rows.repeat_interleave(heads // rows.shape[1], 1)


def built(family: str, repeats: int, dtype: torch.dtype) -> tuple[PreTrainedModel, Causal]:
    """A model with its pattern of layers so many times over."""
    model_type, values = FAMILIES[family]
    if "layer_types" in values:
        types = values["layer_types"] * repeats
        values = values | {"layer_types": types, "num_hidden_layers": len(types)}
    elif family in ATTENTION:
        values = values | {"num_hidden_layers": 2 * repeats}
    else:
        values = values | {"num_hidden_layers": values["num_hidden_layers"] * repeats}
    if "activation_sparsity_pattern" in values:
        values = values | {"activation_sparsity_pattern": values["activation_sparsity_pattern"] * repeats}
    if values.get("num_kv_shared_layers"):
        values = values | {"num_kv_shared_layers": values["num_kv_shared_layers"] * repeats}
    model = paged(tiny(model_type, **values)).to(dtype).requires_grad_(False)
    return model, Causal(derive(model, 4, "float32"))


class Begins(DeviceStates):
    """States of one sequence, with nothing before the step."""

    def __init__(self, layout: ModelLayout) -> None:
        page_bytes = max((group.spec.page_bytes for group in layout.groups if group.kind == "state"), default=0)
        super().__init__(state_views(torch.full((2 * page_bytes,), 0xFF, dtype=torch.uint8), layout.groups))
        self.called: list[tuple[int, str]] = []

    def begin(self, length: int) -> None:
        self.step = device_step(np.array([0, length]), np.array([0]), np.array([1]), "cpu")

    def run(self, operation: str, layer: int, *others: Any) -> Tensor:
        self.called.append((layer, operation))
        return super().run(operation, layer, *others)


def logits(model: PreTrainedModel, batch: Causal, length: int) -> Tensor:
    ids = torch.randint(0, 200, (1, length), generator=torch.Generator().manual_seed(length))
    batch.positions = torch.arange(length, dtype=torch.int32)
    batch.states.begin(length)
    for mixer in mixers(model):
        mixer.batch = batch.states
    with torch.inference_mode():
        out: Tensor = model(
            input_ids=ids, position_ids=torch.arange(length)[None], use_cache=False, attention_batch=batch
        ).logits
    return out


def compiled_with(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `prepare` compile for another backend; its other options stay."""
    plain: Callable[..., None] = nn.Module.compile

    def compile_(module: nn.Module, **options: Any) -> None:
        plain(module, **options | {"backend": backend})

    monkeypatch.setattr(nn.Module, "compile", compile_)


def graphs_of(family: str, repeats: int, dtype: torch.dtype) -> int:
    """Compile a model, see that it computes the same, and count the graphs that took."""
    counters.clear()
    model, batch = built(family, repeats, dtype)
    merged = prepare(model, compiled=False).merged
    assert (merged > 0) == (dtype is not torch.float32 and family != "phi3"), "16-bit models have projections to merge"
    linear.use(model)  # as compiled models do: what is compared is the compiler alone
    plain = {length: logits(model, batch, length) for length in LENGTHS}
    layers, batch.called = batch.called, []
    operations, batch.states.called = batch.states.called, []
    assert prepare(model, compiled=True).compiled == model.config.num_hidden_layers
    assert {*layers, *(layer for layer, _ in operations)} == set(range(model.config.num_hidden_layers))
    for length, expected in plain.items():
        torch.testing.assert_close(logits(model, batch, length), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert batch.called == layers, "each layer is told its own number, whoever it shares code with"
    assert batch.states.called == operations
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("family", ATTENTION)
def test_layers_compile_to_one_graph_a_class(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pattern of layers more, and no further graph; projections apart and merged; several lengths."""
    _, values = ATTENTION[family]
    repeats = 2 if values.get("num_kv_shared_layers") else 1  # the last layers before those that share are a class
    with monkeypatch.context() as patch:
        compiled_with("aot_eager" if family in FARTHER else "eager", patch)
        graphs = graphs_of(family, repeats, torch.float32)
    assert graphs > 0, "nothing was compiled"
    torch._dynamo.reset()
    compiled_with("eager", monkeypatch)
    assert graphs_of(family, repeats + 1, torch.bfloat16) == graphs


@pytest.mark.parametrize("family", SOME)
def test_layers_with_states_compile_to_one_graph_a_class(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for some; all others were seen to, but take up to a minute each."""
    compiled_with("aot_eager" if family in FARTHER else "eager", monkeypatch)
    graphs = graphs_of(family, 1, torch.bfloat16)
    torch._dynamo.reset()
    assert graphs_of(family, 2, torch.bfloat16) == graphs > 0


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_another_executor_takes_the_same_graphs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does another process, from the compiler's cache: nothing of an executor is compiled in."""
    compiled_with("eager", monkeypatch)
    model, batch = built(family, 1, torch.float32)
    other = Causal(derive(model, 4, "float32"))
    prepare(model, compiled=True)
    logits(model, batch, 5)
    counters.clear()
    logits(model, other, 5)
    assert counters["stats"]["unique_graphs"] == 0
    assert other.called == batch.called
    assert other.states.called == batch.states.called
