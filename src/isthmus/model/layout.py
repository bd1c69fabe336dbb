"""From a model's modules to its layer groups.

Nothing is read from raw configuration keys that the modules would know better: one forward over two tokens (on the
meta device it costs no memory and no arithmetic) shows which module calls the attention function in which layer,
with how many key heads of which size, under which window, and whose rows it was handed. Modules with a recurrent state
are replaced by mixers (`isthmus.model.mixers`), which say what they keep. A model with anything else in a layer that
keeps state between tokens is refused with that layer's name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.errors import ModelError
from isthmus.kernels.reference import Scoring
from isthmus.memory import Group, LayerKV, kv_spec, state_spec
from isthmus.model.attention import NAME
from isthmus.model.mixers import mixers, teach
from isthmus.model.mixers.base import Mixer

TAUGHT_TYPES = {
    "full_attention": False,
    "sliding_attention": True,
    "linear_attention": None,
    "conv": None,
    "hybrid": False,
    "hybrid_sliding": True,
    "mlp": None,
    "moe": None,
}
"""Entries of a config's `layer_types` that can be served, and whether their attention, if they have one, has a window;
None: they have none."""

_HARMLESS_ARGUMENTS = {"position_ids", "cache_position"}


@dataclass(frozen=True)
class ModelLayout:
    """Which layers cache what, and where."""

    groups: tuple[Group, ...]  # "full" first, if there are such layers, windows from narrow to wide, then "state"
    layer_group: Mapping[int, str]  # of every attention layer: the group of its rows
    owner: Mapping[int, int]  # the layer whose rows a layer reads; itself, unless it shares
    heads: Mapping[int, int]  # query heads of every attention layer
    vocab_size: int
    max_model_len: int

    def describe(self) -> str:
        """One line per group, for the log."""
        lines = []
        for group in self.groups:
            if group.kind == "state":
                count = len({part.name.partition(".")[0] for part in group.spec.parts})
                lines.append(f"{group.name}: {count} layers, pages of one sequence and {group.spec.page_bytes:,} bytes")
                continue
            layers = [layer for layer, name in self.layer_group.items() if name == group.name]
            owners = [layer for layer in layers if self.owner[layer] == layer]
            window = "" if group.window is None else f", window {group.window}"
            shared = "" if len(layers) == len(owners) else f" (and {len(layers) - len(owners)} that share their rows)"
            lines.append(
                f"{group.name}: {len(owners)} layers{shared}{window}, {group.spec.token_bytes:,.0f} bytes a token, "
                f"pages of {group.spec.page_size} tokens and {group.spec.page_bytes:,} bytes"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Call:
    """One call of the attention function."""

    module: nn.Module
    heads: int  # of the query
    key: Tensor
    value: Tensor
    window: int | None
    unknown: tuple[str, ...]  # tensor arguments without a meaning here: a bias, an index, ...


class _Trace:
    """Stands in for a step (`Attend`) and notes every call."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, list[_Call]] = {}
        self.mixed: set[Mixer] = set()

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
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
        unknown = tuple(n for n, x in others.items() if isinstance(x, Tensor) and n not in _HARMLESS_ARGUMENTS)
        self.calls.setdefault(module, []).append(_Call(module, query.shape[1], key, value, window, unknown))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def derive(model: PreTrainedModel, page_size: int, cache_dtype: str) -> ModelLayout:
    """The layout of a causal language model built with `attn_implementation="isthmus"`, on any device.

    `cache_dtype`, of keys and values, is a key of `isthmus.memory.spec.ITEMSIZE`. Puts mixers in the place of the
    modules that there are some for. ModelError naming layer number, module class and model type if a layer keeps
    anything that nobody has taught us.
    """
    config = model.config.get_text_config()
    layers = decoder_layers(model)
    teach(layers)
    trace = _Trace()
    failure: Exception | None = None
    try:
        _probe(model, trace)
    except Exception as error:  # a mixer that cannot run here is named below, with this as its cause
        failure = error
    layer_types = getattr(config, "layer_types", None) or [None] * len(layers)
    calls: dict[int, _Call] = {}
    for i, layer in enumerate(layers):
        reason = _objection(layer, trace, layer_types[i])
        if reason is not None:
            raise ModelError(f"layer {i} of {config.model_type} cannot be served: {reason}") from failure
        calls.update((i, trace.calls[m][0]) for m in layer.modules() if m in trace.calls)
    if failure is not None:
        raise ModelError(f"{config.model_type} cannot be served: its forward fails: {failure}") from failure
    parts = [
        (f"{mixer.layer}.{part.name}", part.shape, part.dtype)
        for layer in layers
        for mixer in mixers(layer)
        for part in mixer.parts
    ]
    states = [Group("state", state_spec(parts), "state")] if parts else []
    owner = _owners(calls)
    token_groups, layer_group = _token_groups(calls, owner, page_size, cache_dtype)
    heads = {i: call.heads for i, call in calls.items()}
    most = config.max_position_embeddings
    return ModelLayout((*token_groups, *states), layer_group, owner, heads, config.vocab_size, most)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of the text model, in order. ModelError if there is no such list."""
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    for module in model.modules():
        layers = getattr(module, "layers", None)
        text = getattr(module, "config", None) is config  # and not, say, the vision tower of the same model
        if text and isinstance(layers, nn.ModuleList) and len(layers) >= count:
            return list(layers[:count])
    raise ModelError(f"{config.model_type} has no list of {count} decoder layers to derive a memory layout from")


def _probe(model: PreTrainedModel, trace: _Trace) -> None:
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    implementation = model.config.get_text_config()._attn_implementation
    assert implementation == NAME, f"the model was built with attn_implementation={implementation!r}"
    for mixer in mixers(model):
        mixer.batch = trace
    try:
        with torch.inference_mode(), _experts_stubbed(model):
            model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.ones(1, dtype=torch.long, device=device),
                attention_batch=trace,
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


def _objection(layer: nn.Module, trace: _Trace, layer_type: str | None) -> str | None:
    """Why a layer cannot be served, naming the module; None if it can."""
    if layer_type not in (None, *TAUGHT_TYPES):
        return f"it is {layer_type!r}, which is not one of {', '.join(TAUGHT_TYPES)}"
    taught = {module for mixer in mixers(layer) for module in mixer.module.modules()}
    # What keeps state between tokens knows its layer, to find it in Transformers' cache, or looks at several tokens.
    stateful = [
        m
        for m in layer.modules()
        if m is not layer
        and m not in taught
        and m not in trace.calls
        and (hasattr(m, "layer_idx") or isinstance(m, nn.Conv1d))
        and not any(inner in taught or inner in trace.calls for inner in m.modules())
    ]
    if stateful:
        return f"{type(stateful[0]).__name__} keeps state of a kind that is not known yet"
    unused = [mixer for mixer in mixers(layer) if mixer.parts and mixer not in trace.mixed]
    if unused:
        return f"{type(layer).__name__} does not call its {type(unused[0].module).__name__}"
    calls = [call for module in layer.modules() for call in trace.calls.get(module, ())]
    if len(calls) > 1:
        return f"{type(layer).__name__} calls the attention function {len(calls)} times, not once"
    return _call_objection(calls[0], layer_type) if calls else None


def _call_objection(call: _Call, layer_type: str | None) -> str | None:
    windowed = call.window is not None
    wanted = TAUGHT_TYPES.get(str(layer_type))
    objections = (
        (wanted is not None and windowed != wanted, f"is {layer_type!r} with the window {call.window}"),
        (not getattr(call.module, "is_causal", True), "is not causal"),
        (bool(call.unknown), f"passes {', '.join(call.unknown)} to the attention function"),
    )
    return next((f"{type(call.module).__name__} {text}" for wrong, text in objections if wrong), None)


def _owners(calls: Mapping[int, _Call]) -> dict[int, int]:
    """The layer whose rows each layer reads. One that shares is handed the very tensors its owner computed."""
    first: dict[int, int] = {}
    owner = {i: first.setdefault(id(call.key), i) for i, call in calls.items()}
    for i, o in owner.items():
        assert calls[i].window == calls[o].window, f"layer {i} shares the rows of layer {o}, under another window"
    return owner


def _token_groups(
    calls: Mapping[int, _Call], owner: Mapping[int, int], page_size: int, cache_dtype: str
) -> tuple[list[Group], dict[int, str]]:
    """The groups of the attention layers, and the group of each layer."""
    windows = sorted({call.window for call in calls.values() if call.window is not None})
    names: dict[int | None, str] = {w: "window" if len(windows) == 1 else f"window{w}" for w in windows}
    names[None] = "full"
    groups = []
    for window in (None, *windows):
        mine = [i for i, call in calls.items() if call.window == window and owner[i] == i]
        if mine:
            spec = kv_spec([_layer_kv(i, calls[i], cache_dtype) for i in mine], page_size)
            groups.append(Group(names[window], spec, "append" if window is None else "window", window))
    return groups, {i: names[call.window] for i, call in calls.items()}


def _layer_kv(layer: int, call: _Call, dtype: str) -> LayerKV:
    return LayerKV(layer, call.key.shape[1], call.key.shape[3], call.value.shape[3], dtype)
