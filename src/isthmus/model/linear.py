"""Linear layers on a GPU: for one row and for few, by kernels of our own; for many, by torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from isthmus.kernels import linear as kernels
from isthmus.kernels.linear_row import linear_row


class DeviceLinear(nn.Linear):
    """`nn.Linear` with another product. Inference only."""

    counters: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """`[.., in_features]` -> `[.., out_features]`."""
        out: Tensor = torch.ops.isthmus.linear(input, self.weight, self.bias, self.counters)
        return out


def use(model: nn.Module) -> int:
    """Let 16-bit linear layers of `model` run here, on its GPU; how many there are.

    Subclasses are left alone: they may compute something else with their weight.
    """
    linears = (module for module in model.modules() if type(module) is nn.Linear)
    found = [module for module in linears if module.weight.itemsize == 2 and module.weight.is_contiguous()]
    if not found:
        return 0
    counters = torch.zeros(kernels.TILES, dtype=torch.int32, device=found[0].weight.device)
    for module in found:
        module.__class__ = DeviceLinear
        module.register_buffer("counters", counters, persistent=False)
    return len(found)


def take_bare(graph: GraphModule) -> int:
    """Let products with parameters that a module computes itself, as routers do, run here as well; how many there are.

    `graph` is what Dynamo traced of a layer, and changed in place. Where nothing in it is a `DeviceLinear`, nothing is.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    counters = next((node.args[3] for node in nodes if node.target is torch.ops.isthmus.linear), None)
    if counters is None:
        return 0
    taken = 0
    for node in nodes:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        if node.target is nn.functional.linear and _is_ours(given["weight"]):
            node.target = torch.ops.isthmus.linear
            node.args, node.kwargs = (given["input"], given["weight"], given.get("bias"), counters), {}
            taken += 1
    graph.recompile()
    return taken


def _is_ours(weight: object) -> bool:
    """Whether it is a parameter as it was loaded, such as `use` takes over."""
    known = weight.meta.get("example_value") if isinstance(weight, Node) and weight.op == "placeholder" else None
    return isinstance(known, nn.Parameter) and known.ndim == 2 and known.itemsize == 2 and known.is_contiguous()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    config = kernels.config_of(rows, weight.itemsize)
    if config is None:
        return nn.functional.linear(x, weight, bias)
    given = x.reshape(rows, x.shape[-1])
    if given.stride(1) != 1:  # no row lies together
        given = given.contiguous()
    one = rows == 1
    out = linear_row(given, weight, bias) if one else kernels.linear(given, weight, bias, counters, config)
    return out.view(*x.shape[:-1], len(weight))


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_library = torch.library.Library("isthmus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor counters) -> Tensor"
)
_library.impl("linear", _linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("isthmus::linear", _shape, lib=_library)
