"""How much memory GPUs have, as CUDA counts it: what `serve` takes its share of.

CUDA's total is less than the name says and less than nvidia-smi's, and differs by some thousandths between drivers and
vendors of the card. These are the smallest that PyTorch's out-of-memory messages in public reports give for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.engine.config import parse_size
from isthmus.errors import ConfigError

_GIB = {
    "h200": 139.80,
    "h100": 79.10,
    "h20": 95.00,
    "a100": 79.14,
    "a100-40g": 39.38,
    "l40s": 44.34,
    "l4": 22.03,
    "a10g": 22.06,
    "rtx4090": 23.51,
    "rtx5090": 31.34,
    "b200": 178.35,
}


@dataclass(frozen=True)
class Gpu:
    """A device to plan for."""

    name: str
    memory_bytes: int
    source: str  # where the number is from


GPUS: Mapping[str, Gpu] = {
    name: Gpu(name, int(size * 2**30), f"CUDA's total in public reports, {size:.2f} GiB") for name, size in _GIB.items()
}


def find(text: str) -> Gpu:
    """The GPU of that name, or one of so many bytes. ConfigError lists the names that are known."""
    known = GPUS.get(text.lower().replace(" ", ""))
    if known is not None:
        return known
    try:
        size = parse_size(text)
    except ConfigError:
        raise ConfigError(
            f"--gpu {text}: not a size, nor a GPU known here: {', '.join(GPUS)}; give its memory in bytes, such as 80g"
        ) from None
    if size < 1:
        raise ConfigError(f"--gpu {text}: a GPU has memory: write a size such as 80g")
    return Gpu(text, size, "as given")
