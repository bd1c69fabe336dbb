"""One forward over two tokens, and what is seen in it: who calls the attention function, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from isthmus.kernels.reference import Scoring
from isthmus.model.attention import NAME
from isthmus.model.mixers import mixers
from isthmus.model.mixers.base import Mixer

_HARMLESS_ARGUMENTS = {"position_ids", "cache_position"}


@dataclass(frozen=True)
class Call:
    """One call of the attention function."""

    module: nn.Module
    heads: int  # of the query
    key: Tensor
    value: Tensor
    window: int | None
    chunked: bool  # the window is a chunk
    unknown: tuple[str, ...]  # tensor arguments without a meaning here: a bias, an index, ...


class Trace:
    """Stands in for a step (`Attend`, `Mix`) and notes every call."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions  # int64 [2]
        self.calls: dict[nn.Module, list[Call]] = {}
        self.mixed: set[Mixer] = set()
        self.counts: set[nn.Module] = set()  # modules that make positions of their own
        self.failure: Exception | None = None  # what the forward broke off with
        self.at_work: list[nn.Module] = []  # and where: a layer, then a module in it, and so on inwards

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[nn.Module]) -> Trace:
        """What a forward of a taught model does; on the meta device it costs no memory and no arithmetic."""
        device = next(model.parameters()).device
        trace = cls(torch.arange(2, device=device))
        try:
            trace._run(model, layers)
        except Exception as error:
            trace.failure = error
        return trace

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """See `isthmus.model.mixers.base.Mix`."""
        self.mixed.add(mixer)
        return torch.zeros_like(hidden)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: Scoring,
        window: int | None,
        others: Mapping[str, object],
    ) -> Tensor:
        """See `isthmus.model.attention.Attend`."""
        unknown = tuple(n for n, x in others.items() if isinstance(x, Tensor) and n not in _HARMLESS_ARGUMENTS)
        call = Call(module, query.shape[1], key, value, window, bool(others.get("chunked")), unknown)
        self.calls.setdefault(module, []).append(call)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _run(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        implementation = model.config.get_text_config()._attn_implementation
        assert implementation == NAME, f"the model was built with attn_implementation={implementation!r}"
        for mixer in mixers(model):
            mixer.batch = self
        try:
            with torch.inference_mode(), _experts_stubbed(model), _noting_positions(layers, self.counts, self.at_work):
                model(
                    input_ids=torch.zeros_like(self.positions)[None],
                    position_ids=self.positions[None],
                    use_cache=False,
                    logits_to_keep=torch.ones_like(self.positions[:1]),
                    attention_batch=self,
                )
        finally:
            for mixer in mixers(model):
                mixer.batch = None


@contextlib.contextmanager
def _experts_stubbed(model: nn.Module) -> Iterator[None]:
    """Experts keep their input's shape, but route by value, which the meta device does not have."""

    def zeros(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return torch.zeros_like(hidden_states)

    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for module in experts:
        module.forward = zeros
    try:
        yield
    finally:
        for module in experts:
            del module.forward


class _Arange(TorchFunctionMode):
    """Notes which module is at work when tokens are counted."""

    def __init__(self, found: set[nn.Module], at_work: list[nn.Module]) -> None:
        super().__init__()
        self.found = found
        self.at_work = at_work

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.arange and self.at_work:
            self.found.add(self.at_work[-1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _noting_positions(layers: Sequence[nn.Module], found: set[nn.Module], at_work: list[nn.Module]) -> Iterator[None]:
    """Modules that count tokens themselves take the batch for one sequence, and would be wrong in silence."""
    mode = _Arange(found, at_work)

    def enter(module: nn.Module, args: object) -> None:
        mode.at_work.append(module)

    def leave(module: nn.Module, args: object, output: object) -> None:
        mode.at_work.pop()

    hooks = []
    for module in {module for layer in layers for module in layer.modules()}:
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()
