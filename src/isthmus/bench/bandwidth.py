"""What a device can do at best: copy bytes and multiply matrices, measured in the run that is compared with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def copy_bandwidth(device: torch.device, nbytes: int, samples: int = 7) -> float:
    """Bytes a second, read and written, of copying a buffer of `nbytes` into another: the median of several."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    destination = torch.empty_like(source)
    seconds = _seconds(lambda: destination.copy_(source), device, samples)
    return 2 * source.nbytes / seconds


def matmul_flops(
    device: torch.device, size: int = 8192, samples: int = 7, *, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Operations a second of a product of two square matrices of random numbers."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right, out=out), device, samples)


def _seconds(work: Callable[[], object], device: torch.device, samples: int, rounds: int = 5) -> float:
    for _ in range(2):
        work()
    times = []
    for _ in range(samples):
        _wait(device)
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        _wait(device)
        times.append((time.perf_counter() - start) / rounds)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
