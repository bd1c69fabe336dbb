"""Kernels that Inductor writes for a GPU that is not here, in a process of its own.

    python -m tests.model.pretended_hopper

prints, as JSON, the bodies of the Triton kernels that each of `CASES` becomes on an H200 under the options of
`isthmus.model.compile`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget

from isthmus.model import compile as ours
from isthmus.model.top_k import decompositions

H200 = SimpleNamespace(
    name="H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName="",
)


class Driver:
    """Triton's view of it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """torch believes that it is there."""
    patches: list[contextlib.AbstractContextManager[Any]] = [
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=H200),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch.object(ours, "is_dependent", return_value=True),
        mock.patch.object(CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
        mock.patch.object(CudaInterface, "get_device_properties", staticmethod(lambda *_: H200)),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H200)),
        mock.patch.object(CudaInterface, "is_available", staticmethod(lambda: True)),
        mock.patch.object(CudaInterface, "current_device", staticmethod(lambda: 0)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        triton.runtime.driver.set_active(Driver())
        yield


def bodies(function: Callable[[Tensor], Any], *shape: int) -> list[str]:
    """Of the kernels that a function of a bfloat16 tensor of that shape becomes."""
    shapes = ShapeEnv()
    fake = FakeTensorMode(shape_env=shapes)
    with fake:
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        traced = make_fx(lambda x: tree_leaves(function(x)), decompositions(), "real")(x)
    with ours.options(), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
        graph = GraphLowering(traced, shape_env=shapes)
        with V.set_graph_handler(graph):
            graph.run(x)
            code, _ = graph.codegen()
    return re.findall(r"\ndef triton_.*?'''", code.value, re.DOTALL)


def norms(x: Tensor) -> Tensor:
    """A norm, a sum, a norm: of a row that Inductor would read three times."""
    y = x + x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    return y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def long(x: Tensor) -> Tensor:
    """Rows longer than a program holds."""
    wide = x.repeat(1, 32)
    out: Tensor = wide / wide.float().pow(2).sum(-1, keepdim=True).sqrt()
    return out


def filled(x: Tensor) -> Any:
    """Kernels that only write."""
    return torch.zeros(7, 64, device=x.device), torch.arange(9, device=x.device), torch.sin(x)


def both_ways(x: Tensor) -> Any:
    """A large tensor reduced by rows and by columns."""
    wide = x.float()
    return (wide * 3).sum(-1), (wide * 2).sum(0)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(1)
    x.mul_(3)
    return torch.slice_scatter(y, x.narrow(0, 0, 4), 0, 1) * 2


def scattered(x: Tensor) -> Tensor:
    chosen = x.narrow(1, 0, 64).topk(2, -1).indices
    return torch.zeros_like(x).scatter_(1, chosen, 1.0).cumsum(-1) + x.float().softmax(-1)


CASES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, int]]] = {
    "norms": (norms, (5, 2560)),
    "long": (long, (5, 2560)),
    "filled": (filled, (5, 64)),
    "both ways": (both_ways, (8192, 2048)),
    "in place": (in_place, (5, 2560)),
    "scattered": (scattered, (5, 2560)),
}

if __name__ == "__main__":
    with pretended():
        print(json.dumps({name: bodies(function, *shape) for name, (function, shape) in CASES.items()}))
