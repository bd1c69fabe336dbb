"""Make a loaded model fast on a GPU: projections of one input merged, decoder layers compiled.

Layers are compiled one by one ("regionally"): layers of one class share the compiled code, so start-up does not grow
with their number, and shapes are symbolic, so that one compilation serves every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from isthmus.model import experts
from isthmus.model.device_attention import hang, tag
from isthmus.model.layout import decoder_layers
from isthmus.model.mixers import stand_ins
from isthmus.model.optimize import merge_projections

_VARIANTS = 64  # of one layer class, before torch gives up on compiling it (it must not: fullgraph raises)


@dataclass(frozen=True)
class Prepared:
    """What was done, for the log."""

    merged: int
    compiled: int
    experts: int  # modules of them

    def __str__(self) -> str:
        how = f"{self.compiled} layers compiled" if self.compiled else "layers not compiled (--enforce-eager)"
        return f"{how}, {self.merged} projections merged"


def prepare(model: PreTrainedModel, *, compiled: bool) -> Prepared:
    """Change `model` in place; it has its weights, its layout was derived, and it is on its device.

    fp32 models keep their projections apart: they are the ones compared with Transformers token for token.
    """
    merged = merge_projections(model)
    routed = experts.use(model)
    tag(model)
    for stand_in in stand_ins(model):
        hang(stand_in.module, stand_in.layer)
    layers = decoder_layers(model) if compiled else []
    for layer in layers:
        layer.compile(dynamic=True, fullgraph=True)
    if compiled:
        torch._dynamo.config.recompile_limit = _VARIANTS
    return Prepared(merged, len(layers), routed)
