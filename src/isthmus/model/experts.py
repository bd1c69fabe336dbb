"""Experts on a GPU: the function `isthmus` in Transformers' table of experts' implementations.

Modules that Transformers lets choose (`use_experts_implementation`) say how their weights lie; what is done between
the two products, and behind them, stays the module's and torch's. Both products are opaque operators, so that a layer
compiles to one graph around them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from isthmus.kernels import experts as kernels
from isthmus.kernels.expert_rows import are_few, expert_rows

NAME = "isthmus"
PLAIN = "isthmus_plain"
"""The same, one kernel after the other."""


def use(model: PreTrainedModel, *, early: bool) -> int:
    """Let the experts of `model` run here, on its GPU; how many modules of them there are. Others are left alone.

    early: kernels may begin before the one before them has ended (`isthmus.kernels.dependent`).
    """
    name = NAME if early else PLAIN
    model.set_experts_implementation(name)
    found = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for module in found:
        assert module.config._experts_implementation == name, f"{type(module).__name__} kept experts of its own"
    return len(found)


def _forward(early: bool, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states `[T, width]`, index and weights `[T, top_k]` -> `[T, width]`."""
    tokens, top_k = top_k_index.shape
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, expert_of = getattr(module, name), top_k_index.contiguous().view(-1)
    work = torch.ops.isthmus.sort_pairs(expert_of, len(up), up.itemsize, module.is_transposed, early)
    x = _linear(module, name, hidden_states, expert_of, work, top_k, early)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _linear(module, "down_proj", x, expert_of, work, 1, early)
    if getattr(module, "has_post_expert_norm", False):  # Transformers 5.17 has none
        x = module.post_expert_norm(x)
    out = (x.view(tokens, top_k, x.shape[-1]) * top_k_weights[..., None]).sum(1)
    return out.to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor, expert_of: Tensor, work: Tensor, top_k: int, early: bool) -> Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    weight, transposed = getattr(module, name), module.is_transposed
    out: Tensor = torch.ops.isthmus.expert_linear(x, expert_of, work, weight, bias, top_k, transposed, early)
    return out


def _sort_pairs(expert_of: Tensor, experts: int, itemsize: int, transposed: bool, early: bool) -> Tensor:
    if are_few(len(expert_of), experts, itemsize, transposed=transposed):
        return _work(expert_of, experts, itemsize, transposed, early)  # which nobody reads
    block_m = kernels.config_of(len(expert_of), experts, itemsize).block_m
    return kernels.sort_pairs(expert_of, experts, block_m, early=early)


def _work(expert_of: Tensor, experts: int, itemsize: int, transposed: bool, early: bool) -> Tensor:
    return expert_of.new_empty(kernels.work_size(expert_of.shape[0], experts), dtype=torch.int32)


def _expert_linear(
    x: Tensor,
    expert_of: Tensor,
    work: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    transposed: bool,
    early: bool,
) -> Tensor:
    if are_few(len(expert_of), len(weight), weight.itemsize, transposed=transposed):
        return expert_rows(x, expert_of, weight, bias, top_k=top_k, early=early)
    return kernels.expert_linear(x, work, weight, bias, top_k=top_k, transposed=transposed, early=early)


def _rows(
    x: Tensor,
    expert_of: Tensor,
    work: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    transposed: bool,
    early: bool,
) -> Tensor:
    return x.new_empty(x.shape[0] * top_k, weight.shape[2 if transposed else 1])


for _name, _early in ((NAME, True), (PLAIN, False)):
    ALL_EXPERTS_FUNCTIONS.register(_name, partial(_forward, _early))
_library = torch.library.Library("isthmus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "sort_pairs(Tensor expert_of, int experts, int itemsize, bool transposed, bool early) -> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    "expert_linear(Tensor x, Tensor expert_of, Tensor work, Tensor weight, Tensor? bias, int top_k, bool transposed, "
    "bool early) -> Tensor"
)
_library.impl("sort_pairs", _sort_pairs, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("expert_linear", _expert_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("isthmus::sort_pairs", _work, lib=_library)
torch.library.register_fake("isthmus::expert_linear", _rows, lib=_library)
