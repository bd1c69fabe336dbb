"""What there is of a GPU: programs that run at once, and what a kernel's build must fit into."""

from __future__ import annotations

import functools

import torch
from triton.runtime import driver

HOPPER = 227 << 10
"""Bytes; an A100 has 163 KiB, consumers' GPUs from Ampere to Blackwell 99."""


@functools.cache
def cores(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 of what is none."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@functools.cache
def shared_bytes() -> int:
    """Of shared memory, that a program may have on the GPU that torch uses; a Hopper's where there is none."""
    if not torch.cuda.is_available():
        return HOPPER
    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])
