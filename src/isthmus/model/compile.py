"""Make a loaded model fast on a GPU: projections of one input merged, decoder layers compiled.

Layers are compiled one by one ("regionally"): layers of one class share the compiled code, so start-up does not grow
with their number, and shapes are symbolic, so that one compilation serves every batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from transformers import PreTrainedModel

from isthmus.kernels.dependent import is_dependent
from isthmus.model import experts, linear
from isthmus.model.device_attention import hang, tag
from isthmus.model.layout import decoder_layers
from isthmus.model.mixers import stand_ins
from isthmus.model.optimize import merge_projections
from isthmus.model.top_k import decompositions

_ROW = 8192
"""Numbers of a row that a program holds while it reduces and uses them."""

_CODE = "isthmus 3"
"""Names what is generated here in the cache of compiled layers: to be changed with `Choices`, `_early_and_waiting` or
`isthmus.model.top_k`."""

_VARIANTS = 64  # of one layer class, before torch gives up on compiling it (it must not: fullgraph raises)


@dataclass(frozen=True)
class Prepared:
    """What was done, for the log."""

    merged: int
    compiled: int
    experts: int  # modules of them
    linears: int  # layers with a product of our own for few rows

    def __str__(self) -> str:
        how = f"{self.compiled} layers compiled" if self.compiled else "layers not compiled (--enforce-eager)"
        return f"{how}, {self.merged} projections merged, {self.linears} linear layers with a kernel for few rows"


def prepare(model: PreTrainedModel, *, compiled: bool) -> Prepared:
    """Change `model` in place; it has its weights, its layout was derived, and it is on its device.

    fp32 models keep their projections apart: they are the ones compared with Transformers token for token.
    """
    merged = merge_projections(model)
    routed = experts.use(model, early=compiled)
    linears = linear.use(model) if compiled else 0
    tag(model)
    for stand_in in stand_ins(model):
        hang(stand_in.module, stand_in.layer)
    layers = decoder_layers(model) if compiled else []
    for layer in layers:
        layer.compile(backend=compile_layer, dynamic=True, fullgraph=True)
    if compiled:
        torch._dynamo.config.recompile_limit = _VARIANTS
    return Prepared(merged, len(layers), routed, linears)


class Choices(InductorChoices):
    """Norms read their row once. Inductor reads rows of more than 1,024 once for every reduction, and once to use
    them: two norms with a sum between them take 2.1 us instead of 5.1 so (batch 1, width 2,560, an H200)."""

    @staticmethod
    def uuid() -> str:
        """Names them in the cache of compiled layers."""
        return _CODE

    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        """Whether a program holds all that it reduces."""
        inner = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
        if inner and V.graph.sizevars.statically_known_leq(features.reduction_numel, _ROW):
            return bool(inductor.triton.persistent_reductions)
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)


def compile_layer(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor with `options` and `decompositions`, and linear layers of our own: a backend of torch.compile."""
    linear.take_bare(graph)
    with options():
        compiled = compile_fx(graph, inputs, decompositions=decompositions())
    assert callable(compiled)  # anything else is for ahead-of-time compilation
    return compiled


@contextlib.contextmanager
def options() -> Iterator[None]:
    """Inductor's, while it compiles a layer: `Choices`, and kernels that begin before the one before them has ended,
    where the GPU can (`isthmus.kernels.dependent`)."""
    values = {
        "inductor_choices_class": Choices,
        "triton.enable_pdl": is_dependent(),
        "triton.mix_order_reduction": False,  # a kernel of that sort waits inside its loop, behind its first loads
    }
    with (
        V.set_choices_handler(Choices()),
        inductor.patch(values),
        torch.compiler.config.patch(cache_key_tag=_CODE),  # type: ignore[attr-defined]
        _early_and_waiting(),
    ):
        yield


@contextlib.contextmanager
def _early_and_waiting() -> Iterator[None]:
    """Kernels of Inductor let the next one begin, and then wait before they touch memory for the first time, each of
    them.

    Inductor leaves the wait out where the kernel before has written nothing by the name of what is read. But that one
    may not have waited either, as one that only writes does not, and buffers share memory under several names. It lets
    the next kernel begin only behind its last load, when there is nothing left that the next could have done meanwhile.
    """
    before_access, filtered = TritonKernel._handle_pdl_before_access, TritonKernel._filter_pdl

    def wait(kernel: TritonKernel, *args: Any, **given: Any) -> Any:
        scheduler = V.graph.scheduler
        if scheduler is None:  # a template is lowered
            return before_access(kernel, *args, **given)
        previous, scheduler.previous_node = scheduler.previous_node, None  # as if nothing were known of it
        try:
            return before_access(kernel, *args, **given)  # type: ignore[no-untyped-call]
        finally:
            scheduler.previous_node = previous

    def let_next(kernel: TritonKernel, code: IndentedBuffer) -> None:
        filtered(kernel, code)  # leaves one wait
        lines = [line for line in code._lines if not (isinstance(line, str) and kernel.GDC_LAUNCH in line)]
        waits = [i for i, line in enumerate(lines) if isinstance(line, str) and kernel.GDC_WAIT in line]
        assert len(waits) <= 1, "Inductor leaves several waits in a kernel"
        for i in waits:
            lines.insert(i, str(lines[i]).replace(kernel.GDC_WAIT, kernel.GDC_LAUNCH))
        code._lines = lines

    TritonKernel._handle_pdl_before_access = wait  # type: ignore[assignment,method-assign]
    TritonKernel._filter_pdl = let_next  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        TritonKernel._handle_pdl_before_access = before_access  # type: ignore[method-assign]
        TritonKernel._filter_pdl = filtered  # type: ignore[method-assign]
