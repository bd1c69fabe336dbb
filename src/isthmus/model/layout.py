"""From a model's modules to its layer groups.

Nothing is read from raw configuration keys that the modules would know better: one forward over two tokens (on the
meta device it costs no memory and no arithmetic) shows which module calls the attention function in which layer,
with how many key heads of which size, under which window, and whose rows it was handed. Modules with a recurrent state
are replaced by mixers (`isthmus.model.mixers`), which say what they keep. A model with anything else in a layer that
keeps state between tokens is refused with that layer's name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from isthmus.errors import ModelError
from isthmus.memory import Group, LayerKV, kv_spec, state_spec
from isthmus.model.latent import LATENT, compress
from isthmus.model.mixers import mixers, stand_ins, teach
from isthmus.model.probe import Call, Trace

TAUGHT_TYPES = {
    "full_attention": False,
    "sliding_attention": True,
    "chunked_attention": True,
    "linear_attention": None,
    "conv": None,
    "hybrid": False,
    "hybrid_sliding": True,
    "mlp": None,
    "moe": None,
}
"""Entries of a config's `layer_types` that can be served, and whether their attention, if they have one, has a window;
None: they have none."""

UNBOUNDED = 1 << 20
"""Tokens that a model may have whose config sets no limit: it keeps states alone, whose size no length changes."""


@dataclass(frozen=True)
class ModelLayout:
    """Which layers cache what, and where."""

    groups: tuple[Group, ...]  # "full" first, if there are such layers, windows from narrow to wide, then "state"
    layer_group: Mapping[int, str]  # of every attention layer: the group of its rows
    owner: Mapping[int, int]  # the layer whose rows a layer reads; itself, unless it shares
    heads: Mapping[int, int]  # query heads of every attention layer
    vocab_size: int
    max_model_len: int
    chunked: frozenset[str] = frozenset()
    """Window groups whose layers see from the last multiple of the window on, which is less than the window: they cache
    a window all the same."""

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
            seen = "chunks of" if group.name in self.chunked else "window"
            window = "" if group.window is None else f", {seen} {group.window}"
            shared = "" if len(layers) == len(owners) else f" (and {len(layers) - len(owners)} that share their rows)"
            lines.append(
                f"{group.name}: {len(owners)} layers{shared}{window}, {group.spec.token_bytes:,.0f} bytes a token, "
                f"pages of {group.spec.page_size} tokens and {group.spec.page_bytes:,} bytes"
            )
        return "\n".join(lines)


def derive(model: PreTrainedModel, page_size: int, cache_dtype: str) -> ModelLayout:
    """The layout of a causal language model built with `attn_implementation="isthmus"`, on any device.

    `cache_dtype`, of keys and values, is a key of `isthmus.memory.spec.ITEMSIZE`. Puts mixers in the place of the
    modules that there are some for. ModelError naming layer number, module class and model type if a layer keeps
    anything that nobody has taught us.
    """
    config = model.config.get_text_config()
    layers = decoder_layers(model)
    teach(layers, model.dtype)
    compress(module for layer in layers for module in layer.modules())
    trace = Trace.of(model, layers)
    layer_types = getattr(config, "layer_types", None) or [None] * len(layers)
    calls: dict[int, Call] = {}
    for i, layer in enumerate(layers):
        if trace.failure is not None and layer in trace.at_work:
            reason: str | None = _broken(trace)
        else:
            reason = _objection(i, layer, trace, layer_types[i])
        if reason is not None:
            raise ModelError(f"layer {i} of {config.model_type} cannot be served: {reason}") from trace.failure
        calls.update((i, trace.calls[m][0]) for m in layer.modules() if m in trace.calls)
    if trace.failure is not None:
        raise ModelError(f"{config.model_type} cannot be served: its forward fails: {trace.failure}") from trace.failure
    owner = _owners(calls)
    names = _names(calls)
    token_groups = _token_groups(calls, owner, names, page_size, cache_dtype)
    return ModelLayout(
        (*token_groups, *_state_groups(layers)),
        names,
        owner,
        {i: call.heads for i, call in calls.items()},
        config.vocab_size,
        getattr(config, "max_position_embeddings", None) or UNBOUNDED,
        frozenset(names[i] for i, call in calls.items() if call.chunked),
    )


def decoder(model: PreTrainedModel) -> nn.Module:
    """The module that has the decoder layers of the text model and gives hidden states. ModelError if there is none."""
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    for module in model.modules():
        layers = getattr(module, "layers", None)
        text = getattr(module, "config", None) is config  # and not, say, the vision tower of the same model
        if text and isinstance(layers, nn.ModuleList) and len(layers) >= count:
            found: nn.Module = module
            return found
    raise ModelError(f"{config.model_type} has no list of {count} decoder layers to derive a memory layout from")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of the text model, in order. ModelError if there is no such list."""
    layers: Sequence[nn.Module] = decoder(model).layers  # type: ignore[assignment]
    return list(layers[: model.config.get_text_config().num_hidden_layers])


def _broken(trace: Trace) -> str:
    """Why the layer cannot be served in which the forward broke off."""
    taught = {
        module for layer in trace.at_work for stand_in in stand_ins(layer) for module in stand_in.module.modules()
    }
    stateful = next((m for m in trace.at_work[1:] if _keeps_state(m) and m not in taught), None)
    if stateful is not None:  # which is why it cannot run here
        return f"{type(stateful).__name__} keeps state of a kind that is not known yet"
    return f"{type(trace.at_work[-1]).__name__} fails: {trace.failure}"


def _keeps_state(module: nn.Module) -> bool:
    """What keeps state between tokens convolves them, or knows its layer, to find it in the cache that it is handed
    beside hidden states."""
    taken = len(inspect.signature(type(module).forward).parameters) - 1  # but for itself
    return isinstance(module, nn.Conv1d) or (hasattr(module, "layer_idx") and taken > 1)


def _objection(i: int, layer: nn.Module, trace: Trace, layer_type: str | None) -> str | None:
    """Why a layer cannot be served, naming the module; None if it can."""
    if layer_type not in (None, *TAUGHT_TYPES):
        return f"it is {layer_type!r}, which is not one of {', '.join(TAUGHT_TYPES)}"
    taught = {module for stand_in in stand_ins(layer) for module in stand_in.module.modules()}
    stateful = [
        m
        for m in layer.modules()
        if m is not layer
        and m not in taught
        and m not in trace.calls
        and _keeps_state(m)
        and not any(inner in taught or inner in trace.calls for inner in m.modules())
    ]
    if stateful:
        return f"{type(stateful[0]).__name__} keeps state of a kind that is not known yet"
    unused = [mixer for mixer in mixers(layer) if mixer not in trace.mixed]
    if unused:
        return f"{type(layer).__name__} does not call its {type(unused[0].module).__name__}"
    counting = next((m for m in layer.modules() if m in trace.counts), None)
    if counting is not None:
        return f"{type(counting).__name__} counts positions of its own, which a batch of several sequences has not"
    calls = [call for module in layer.modules() for call in trace.calls.get(module, ())]
    if len(calls) > 1:
        return f"{type(layer).__name__} calls the attention function {len(calls)} times, not once"
    return _objection_to(i, calls[0], layer_type) if calls else None


def _objection_to(i: int, call: Call, layer_type: str | None) -> str | None:
    windowed = call.window is not None
    wanted = TAUGHT_TYPES.get(str(layer_type))
    objections = (
        (wanted is not None and windowed != wanted, f"is {layer_type!r} with the window {call.window}"),
        (not getattr(call.module, "is_causal", True), "is not causal"),
        (getattr(call.module, "layer_idx", i) != i, "takes itself for another layer's"),
        (bool(call.unknown), f"passes {', '.join(call.unknown)} to the attention function"),
    )
    return next((f"{type(call.module).__name__} {text}" for wrong, text in objections if wrong), None)


def _owners(calls: Mapping[int, Call]) -> dict[int, int]:
    """The layer whose rows each layer reads. One that shares is handed the very tensors its owner computed."""
    first: dict[int, int] = {}
    owner = {i: first.setdefault(id(call.key), i) for i, call in calls.items()}
    for i, o in owner.items():
        assert calls[i].window == calls[o].window, f"layer {i} shares the rows of layer {o}, under another window"
    return owner


def _names(calls: Mapping[int, Call]) -> dict[int, str]:
    """The group of each attention layer."""
    spans = {(call.window, call.chunked) for call in calls.values()}

    def name(call: Call) -> str:
        if call.window is None:
            return "full"
        alike = [window for window, chunked in spans if window is not None and chunked == call.chunked]
        return ("chunk" if call.chunked else "window") + ("" if len(alike) == 1 else str(call.window))

    return {i: name(call) for i, call in calls.items()}


def _token_groups(
    calls: Mapping[int, Call], owner: Mapping[int, int], names: Mapping[int, str], page_size: int, cache_dtype: str
) -> list[Group]:
    """The groups of the attention layers: without a window first, then from narrow to wide."""
    members: dict[str, list[int]] = {}
    for i in sorted(calls, key=lambda i: (calls[i].window or 0, calls[i].chunked, i)):
        if owner[i] == i:
            members.setdefault(names[i], []).append(i)
    groups = []
    for name, mine in members.items():
        spec = kv_spec([_layer_kv(i, calls[i], cache_dtype) for i in mine], page_size)
        window = calls[mine[0]].window
        groups.append(Group(name, spec, "append" if window is None else "window", window))
    return groups


def _state_groups(layers: Sequence[nn.Module]) -> list[Group]:
    """The group of the states, if there are any."""
    parts = [
        (f"{mixer.layer}.{part.name}", part.shape, part.dtype)
        for layer in layers
        for mixer in mixers(layer)
        for part in mixer.parts
    ]
    return [Group("state", state_spec(parts), "state")] if parts else []


def _layer_kv(layer: int, call: Call, dtype: str) -> LayerKV:
    v_dim = 0 if hasattr(call.module, LATENT) else call.value.shape[3]
    return LayerKV(layer, call.key.shape[1], call.key.shape[3], v_dim, dtype)
