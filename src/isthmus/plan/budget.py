"""Where the arena's bytes come from: a GPU's memory less weights and a reserve, or what was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.engine import sizing
from isthmus.engine.config import MemoryConfig
from isthmus.errors import ConfigError
from isthmus.plan.gpus import Gpu
from isthmus.plan.shape import Shape

RESERVE = 4608 << 20
"""Bytes beside weights and arena: activations, CUDA graphs, CUDA itself. `serve` measures them when it starts, which
nothing can without the device. On one H200 they came to 3.98 and 4.71 GB for the shapes of Gemma 3 1B and 4B with the
default settings of a GPU (docs/results/2026-11-29-h200-throughput-a-*.json)."""


@dataclass(frozen=True)
class Budget:
    """Of one rank. Each number with where it is from."""

    arena_bytes: int
    arena_source: str
    weight_bytes: int
    weight_source: str
    gpu: str | None = None
    gpu_bytes: int | None = None
    gpu_source: str | None = None
    utilization: float | None = None
    reserve_bytes: int | None = None
    reserve_source: str | None = None


def budget(
    shape: Shape, memory: MemoryConfig, gpu: Gpu | None, weights: int | None = None, reserve: int | None = None
) -> Budget:
    """The arena of one rank, sized as `serve` does.

    Args:
        gpu: None: an arena of `--pool-bytes`, or of the size that is the default on a CPU.
        weights: bytes of the whole model, if the parameters are not stored as they are counted here.
        reserve: bytes beside weights and arena, if something is known of them.

    ConfigError if weights and reserve leave no arena, or one without a page of every group.
    """
    whole = shape.weight_bytes if weights is None else weights
    mine = -(-whole // shape.ranks)
    counted = f"parameters in {shape.dtype}" if weights is None else "as given"
    source = counted if shape.ranks == 1 else f"{counted}, split evenly over {shape.ranks} ranks"
    if gpu is None:
        size = memory.pool_bytes or sizing.DEFAULT_POOL_BYTES
        given = "--pool-bytes" if memory.pool_bytes else "neither --gpu nor --pool-bytes: what serve takes on a CPU"
        return Budget(size, given, mine, source)
    kept = RESERVE if reserve is None else reserve
    room = int(gpu.memory_bytes * memory.gpu_memory_utilization) - mine - kept
    if room <= 0 and memory.pool_bytes is None:
        raise ConfigError(
            f"{shape.name} does not fit {gpu.name}: of its {gpu.memory_bytes:,} bytes x --gpu-memory-utilization "
            f"{memory.gpu_memory_utilization}, weights take {mine:,} and the reserve {kept:,}: split it (-tp), take a "
            "larger GPU, or say what a quantised checkpoint takes (--weights)"
        )
    free = gpu.memory_bytes - mine - kept
    size = sizing.device_arena_bytes(memory, shape.layout.groups, room, free, mine, kept)
    return Budget(
        arena_bytes=size,
        arena_source="--pool-bytes" if memory.pool_bytes else "what is left",
        weight_bytes=mine,
        weight_source=source,
        gpu=gpu.name,
        gpu_bytes=gpu.memory_bytes,
        gpu_source=gpu.source,
        utilization=memory.gpu_memory_utilization,
        reserve_bytes=kept,
        reserve_source="assumed: serve measures it on the device" if reserve is None else "as given",
    )
