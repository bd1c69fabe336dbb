"""Linear layers on a GPU: for few rows, by a kernel of our own; for many, by torch.

The memory rests while a decode of few rows computes what is not a product. So whoever reads a weight has the L2 fetch
those behind it, in the order in which the model lists its layers: `AHEAD` bytes from the end of its own. Nothing is
asked for twice: what the weights before asked for is left out. If a model runs its layers in another order, some bytes
come for nothing; no result depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from isthmus.kernels import linear as kernels

AHEAD = 16 << 20
"""Bytes: less than half of the L2 of a GPU that has much to gain (an H200 has 60 MB), so that they are there when their
turn comes."""


class DeviceLinear(nn.Linear):
    """`nn.Linear` with another product. Inference only."""

    counters: Tensor
    ahead: Tensor  # int64 [SPANS * 2], on the CPU

    def forward(self, input: Tensor) -> Tensor:
        """`[.., in_features]` -> `[.., out_features]`."""
        out: Tensor = torch.ops.isthmus.linear(input, self.weight, self.bias, self.counters, self.ahead)
        return out


def use(model: nn.Module) -> int:
    """Let 16-bit linear layers of `model` run here, on its GPU; how many there are. It must not change device any more.

    Subclasses are left alone: they may compute something else with their weight.
    """
    linears = (module for module in model.modules() if type(module) is nn.Linear)
    found = [module for module in linears if module.weight.itemsize == 2 and module.weight.is_contiguous()]
    if not found:
        return 0
    weights = [(module.weight.data_ptr(), module.weight.nbytes) for module in found]
    counters = torch.zeros(kernels.TILES, dtype=torch.int32, device=found[0].weight.device)
    for module, spans in zip(found, asked(weights, AHEAD), strict=True):
        module.__class__ = DeviceLinear
        module.register_buffer("counters", counters, persistent=False)
        numbers = [number for address, size in spans[: kernels.SPANS] for number in (address & -16, size)]
        numbers += [0] * (2 * kernels.SPANS - len(numbers))
        module.register_buffer("ahead", torch.tensor(numbers, device="cpu"), persistent=False)
    return len(found)


def asked(weights: Sequence[tuple[int, int]], ahead: int) -> Iterator[list[tuple[int, int]]]:
    """What each of `weights`, (address, bytes) in their order, has fetched while it is read.

    That is what lies less than `ahead` bytes behind its end and has not been asked for by those before it, which is as
    many bytes as it has, if the last is followed by the first.
    """
    ahead = min(ahead, sum(size for _, size in weights))
    for i, (_, size) in enumerate(weights):
        first, last = max(0, ahead - size), ahead  # behind the end of this one
        spans, place = [], 0
        for address, length in (*weights[i + 1 :], *weights[: i + 1]):
            if place >= last:
                break
            begin, end = max(first, place), min(last, place + length)
            if begin < end:
                spans.append((address + begin - place, end - begin))
            place += length
        yield spans


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor, ahead: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    config = kernels.config_of(rows, weight.itemsize)
    if config is None:
        return nn.functional.linear(x, weight, bias)
    given = x.reshape(rows, x.shape[-1])
    if given.stride(1) != 1:  # no row lies together
        given = given.contiguous()
    out = kernels.linear(given, weight, bias, counters, config, ahead.tolist())
    return out.view(*x.shape[:-1], len(weight))


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor, ahead: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_library = torch.library.Library("isthmus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor counters, Tensor ahead) -> Tensor"
)
_library.impl("linear", _linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("isthmus::linear", _shape, lib=_library)
