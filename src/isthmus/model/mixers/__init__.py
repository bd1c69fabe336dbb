"""Modules of Transformers, taught to run over a flat batch of several sequences out of pages.

A *mixer* stands in for one module: `teach` puts it in the place of the module's `forward`, the weights stay the
module's. It says which parts of a state page the module needs (`parts`), and computes a step with operations that
read and write them (`isthmus.kernels.states`). Attention that takes a batch for one sequence has a stand-in too,
without a state. To teach a new module: a class here, and a line in `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from isthmus.model.mixers.base import Mixer, StandIn
from isthmus.model.mixers.gdn import OlmoGatedDelta, Qwen3NextGatedDelta, Qwen35GatedDelta
from isthmus.model.mixers.inkling import InklingAttention, InklingConv
from isthmus.model.mixers.kda import KimiDelta
from isthmus.model.mixers.lightning import Lightning
from isthmus.model.mixers.llama4 import Llama4Attention
from isthmus.model.mixers.mamba1 import Mamba, ZambaMamba
from isthmus.model.mixers.mamba2 import FalconH1Mamba2, Mamba2
from isthmus.model.mixers.rglru import RecurrentBlock
from isthmus.model.mixers.shared_attention import SharedAttention
from isthmus.model.mixers.shortconv import ShortConv

MIXERS: Mapping[str, type[StandIn]] = {
    "InklingAttention": InklingAttention,
    "InklingShortConvolution": InklingConv,
    "Llama4TextAttention": Llama4Attention,
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
    "Mamba2Mixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "BambaMixer": Mamba2,
    "Zamba2MambaMixer": Mamba2,
    "Zamba2Attention": SharedAttention,
    "FalconH1Mixer": FalconH1Mamba2,
    "MambaMixer": Mamba,
    "FalconMambaMixer": Mamba,
    "JambaMambaMixer": Mamba,
    "ZambaMambaMixer": ZambaMamba,
    "ZambaAttention": SharedAttention,
    "MiniMaxLightningAttention": Lightning,
    "RecurrentGemmaRecurrentBlock": RecurrentBlock,
    "Qwen3NextGatedDeltaNet": Qwen3NextGatedDelta,
    "Qwen3_5GatedDeltaNet": Qwen35GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": Qwen35GatedDelta,
    "LaraMiniGatedDeltaNet": Qwen35GatedDelta,
    "OlmoHybridGatedDeltaNet": OlmoGatedDelta,
    "KimiLinearDeltaAttention": KimiDelta,
    "BailingHybridDeltaAttention": KimiDelta,
}
"""By the class of the module that it stands in for."""


_TAUGHT = "isthmus_mixer"


def teach(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Put a mixer in the place of every module in these decoder layers that there is one for; once is enough.

    `dtype`: of hidden states.
    """
    for i, layer in enumerate(layers):
        for module in layer.modules():
            kind = MIXERS.get(type(module).__name__)
            if kind is not None and not hasattr(module, _TAUGHT):
                mixer = kind(module, i, dtype)
                setattr(module, _TAUGHT, mixer)
                module.forward = mixer.forward


def mixers(module: nn.Module) -> Iterator[Mixer]:
    """Everything with a state in a module that was taught, in the order of its modules."""
    for part in module.modules():
        mixer = getattr(part, _TAUGHT, None)
        if isinstance(mixer, Mixer):
            yield mixer


def stand_ins(module: nn.Module) -> Iterator[StandIn]:
    """Everything that stands in for a module inside one that was taught."""
    for part in module.modules():
        stand_in = getattr(part, _TAUGHT, None)
        if stand_in is not None:
            yield stand_in
