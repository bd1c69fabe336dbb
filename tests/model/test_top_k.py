"""Which `torch.topk` of compiled layers are the kernel's, and that routers choose as they did.

Without a GPU the kernel runs through Triton's interpreter, for layers on the CPU that are taken for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from isthmus.kernels.top_k import MOST, WIDEST
from isthmus.model import top_k
from isthmus.model.compile import compile_layer, prepare
from isthmus.model.top_k import decompositions
from tests.model.test_compile import TOLERANCE, built, logits

OURS, TORCHS = torch.ops.isthmus.top_k.default, torch.ops.aten.topk.default
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """That takes nothing from a cache: what it finds there was compiled for a CPU as it is."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is taken on a CPU too."""
    monkeypatch.setattr(top_k, "DEVICES", ("cpu", "cuda"))


def targets(
    function: Callable[[Tensor], Any], *shape: int, device: str = "cuda", dtype: torch.dtype = BF16
) -> set[Any]:
    """Operators of a function of a tensor, as Inductor is given them; of a GPU that need not be here."""
    with FakeTensorMode():
        x = torch.empty(shape, device=device, dtype=dtype)
        graph = make_fx(lambda x: tree_leaves(function(x)), decompositions(), "real")(x).graph
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 32), (2, 3, 128), (2, WIDEST), (1, 1, 5, 7)])
def test_short_rows_are_ours(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    asked: list[Callable[[Tensor], Any]] = [
        lambda x: x.topk(4),
        lambda x: torch.topk(x, 4, dim=x.ndim - 1),
        lambda x: torch.topk(x, 4, dim=-1, sorted=False),
        lambda x: x.topk(2).values.sum(-1),
    ]
    for function in asked:
        found = targets(function, *shape, dtype=dtype)
        assert OURS in found
        assert TORCHS not in found


@pytest.mark.parametrize(
    ("why", "function", "shape", "given"),
    [
        ("the smallest", lambda x: x.topk(2, largest=False), (3, 32), {}),
        ("another dimension", lambda x: x.topk(2, dim=1), (3, 4, 5), {}),
        ("another dimension, from behind", lambda x: x.topk(2, dim=-2), (3, 4), {}),
        ("one row", lambda x: x.topk(2), (32,), {}),
        ("long rows", lambda x: x.topk(2), (3, WIDEST + 1), {}),
        ("many of a row", lambda x: x.topk(MOST + 1), (3, 128), {}),
        ("none of a row", lambda x: x.topk(0), (3, 128), {}),
        ("wider numbers", lambda x: x.topk(2), (3, 32), {"dtype": torch.float64}),
        ("integers", lambda x: x.topk(2), (3, 32), {"dtype": torch.int64}),
        ("a CPU", lambda x: x.topk(2), (3, 32), {"device": "cpu"}),
    ],
)
def test_others_stay_torchs(
    why: str, function: Callable[[Tensor], Any], shape: tuple[int, ...], given: dict[str, Any]
) -> None:
    found = targets(function, *shape, **given)
    assert TORCHS in found, why
    assert OURS not in found, why


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("function", [lambda x: x.topk(2), lambda x: x.new_zeros(5, 32).topk(x.shape[0])])
def test_sizes_known_only_when_it_runs_stay_torchs(function: Callable[[Tensor], Any]) -> None:
    """A kernel is built for each length of a row, and for each number of what is taken."""
    graph = make_fx(lambda x: tree_leaves(function(x)), decompositions(), "symbolic")(torch.randn(3, 32)).graph
    found = {node.target for node in graph.nodes}
    assert TORCHS in found
    assert OURS not in found


class Router(nn.Module):
    """Scores of experts, whose number is known when it is compiled."""

    def __init__(self, choose: Callable[[Tensor], Any], experts: int) -> None:
        super().__init__()
        self.choose = choose
        self.weight = nn.Parameter(torch.randn(experts, 16))

    def forward(self, x: Tensor) -> Any:
        """Of rows of 16."""
        return self.choose(nn.functional.linear(x, self.weight))


def chosen(x: Tensor) -> Any:
    """As gpt-oss does."""
    values, indices = x.topk(4, dim=-1)
    return values.softmax(-1), indices


def weighted(x: Tensor) -> Any:
    """As Mixtral does."""
    values, indices = x.float().softmax(-1).topk(3, dim=-1)
    return values / values.sum(-1, keepdim=True), indices


def grouped(x: Tensor) -> Any:
    """As DeepSeek does: the best groups by their best two, then experts of these."""
    scores = x.float().sigmoid()
    groups = scores.view(-1, 8, 4).topk(2, dim=-1).values.sum(-1)
    best = torch.topk(groups, k=3, dim=-1, sorted=False).indices
    mask = torch.zeros_like(groups).scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 8, 4).reshape(-1, 32)
    indices = torch.topk(scores.masked_fill(~mask.bool(), float("-inf")), k=5, dim=-1, sorted=False).indices
    return scores.gather(1, indices), indices


def columns(x: Tensor) -> Any:
    """Of numbers that do not lie together."""
    return x.t().contiguous().t().topk(3)


def by_expert(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """In an order that torch does not leave open."""
    order = indices.argsort(-1)
    return values.gather(-1, order), indices.gather(-1, order)


ROUTERS: dict[str, tuple[Callable[[Tensor], Any], int, tuple[int, ...]]] = {
    "chosen": (chosen, 32, (5, 16)),
    "weighted": (weighted, 100, (2, 3, 16)),
    "grouped": (grouped, 32, (7, 16)),
    "columns": (columns, 32, (3, 16)),
}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", ROUTERS)
def test_compiled_routers_choose_as_they_did(name: str, device: str) -> None:
    """Of any number of rows, by one compilation, in whose code the operator is and torch's is not."""
    choose, experts, shape = ROUTERS[name]
    torch.manual_seed(0)
    router = Router(choose, experts).to(device)
    compiled = torch.compile(router, backend=compile_layer, dynamic=True, fullgraph=True)
    rows = [torch.randn(shape, device=device), torch.randn(shape[0] + 6, *shape[1:], device=device)]
    with torch.inference_mode():
        _, (code,) = run_and_get_code(compiled, rows[0])
        assert "torch.ops.isthmus.top_k" in code
        assert "torch.ops.aten.topk" not in code
        counters.clear()
        for x in rows:
            values, indices = by_expert(*router(x)) if name == "grouped" else router(x)
            found = by_expert(*compiled(x)) if name == "grouped" else compiled(x)
            assert torch.equal(found[1], indices)
            torch.testing.assert_close(found[0], values)
        assert counters["stats"]["unique_graphs"] == 0, "compiled again"


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_models_choose_the_same_experts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of Transformers' models compute the same with the operator, of float32 numbers."""
    graphs: list[set[Any]] = []

    def keep(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append({node.target for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    def compile_(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, decompositions=decompositions())
        compiled: Callable[..., Any] = backend(graph, inputs)
        return compiled

    model, batch = built(family, 1, FP32)
    prepare(model, compiled=False)
    plain = logits(model, batch, 33)
    compiler: Callable[..., None] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compiler(self, **given | {"backend": compile_}))
    prepare(model, compiled=True)
    torch.testing.assert_close(logits(model, batch, 33), plain, rtol=TOLERANCE[FP32], atol=TOLERANCE[FP32])
    assert any(OURS in graph for graph in graphs)
    assert not any(TORCHS in graph for graph in graphs)


@pytest.mark.usefixtures("anywhere")
def test_layers_with_it_are_kept_in_the_cache() -> None:
    """So that the next start has them: a table of decompositions is a part of their name there."""
    router = Router(chosen, 32)
    with config.patch(force_disable_caches=False), fresh_cache(), torch.inference_mode():
        for kept in ("miss", "hit"):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(router, backend=compile_layer, dynamic=True, fullgraph=True)(torch.randn(3, 16))
            found = {name for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache") and count}
            assert found == {f"fxgraph_cache_{kept}"}
