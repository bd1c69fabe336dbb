"""Settings against the machine: how large the arena is, where its walls are, how long a sequence it is good for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.engine import capacity
from isthmus.engine.config import EngineConfig, MemoryConfig
from isthmus.errors import ConfigError
from isthmus.memory import Group, Pool
from isthmus.memory.group import null_bytes

DEFAULT_POOL_BYTES = 4 << 30

_log = logging.getLogger(__name__)


def arena_bytes(config: MemoryConfig, groups: Sequence[Group]) -> int:
    """What was asked for, or half of the free memory up to 4 GiB.

    ConfigError if there is not so much memory, or if it does not hold a page of every group.
    """
    available = available_memory()
    if config.pool_bytes is not None and config.pool_bytes > available:
        raise ConfigError(
            f"--pool-bytes {config.pool_bytes:,} is more than the {available:,} bytes of main memory that are free: "
            "lower it"
        )
    size = config.pool_bytes or min(DEFAULT_POOL_BYTES, available // 2)
    least = null_bytes(groups) + capacity.peak_bytes({group.name: group for group in groups}, 1)
    if size < least:
        raise ConfigError(
            f"--pool-bytes {size:,} is smaller than one sequence, which needs {least:,} bytes "
            f"for its first page of {config.page_size} tokens: raise it or lower --page-size"
        )
    return size


def device_arena_bytes(
    config: MemoryConfig, groups: Sequence[Group], room: int, free: int, taken: int, reserve: int
) -> int:
    """What was asked for, or all the room there is on the device.

    Args:
        room: bytes under `--gpu-memory-utilization`, after everything else.
        free: bytes that can be had at all, likewise.
        taken: bytes in use now: weights, and other processes.
        reserve: bytes that running needs beside the arena.

    ConfigError if there is not so much memory, or if it does not hold a page of every group.
    """
    facts = f"{taken:,} bytes are in use and running needs {reserve:,} beside the arena"
    if config.pool_bytes is not None and config.pool_bytes > free:
        left = max(0, free)
        raise ConfigError(f"--pool-bytes {config.pool_bytes:,} is more than the {left:,} left: {facts}; lower it")
    size = config.pool_bytes or room
    least = null_bytes(groups) + capacity.peak_bytes({group.name: group for group in groups}, 1)
    if size < least:
        what = "--pool-bytes" if config.pool_bytes else f"--gpu-memory-utilization {config.gpu_memory_utilization}"
        raise ConfigError(
            f"{what} leaves {max(0, size):,} bytes for the arena, where one page of every group takes {least:,}: "
            f"{facts}; raise it, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return size // 16 * 16


def walls(config: MemoryConfig, groups: Sequence[Group], size: int, context: int) -> Mapping[str, int] | None:
    """Bytes per group of an arena of `size` bytes, None for unified memory. ConfigError if that is impossible.

    `context`: tokens of the longest sequence there can be; a workload of longer ones is cut to it.
    """
    if config.memory == "unified":
        return None
    if config.static_split is not None:
        return capacity.split_walls(groups, size, config.static_split)
    prompt, output = config.static_workload
    if prompt + output > context and config.static_workload != MemoryConfig().static_workload:
        _log.warning("--static-workload %d,%d is cut to the longest sequence, %d tokens", prompt, output, context)
    output = max(1, min(output, context - 1))
    return capacity.best_walls(groups, size, [(max(1, min(prompt, context - output)), output)])


def max_model_len(config: EngineConfig, context: int, pool: Pool) -> int:
    """What was asked for; else the model's context, or what the pool and `--max-total-tokens` allow.

    ConfigError if what was asked for is impossible, or nothing is possible.
    """
    asked, most = config.model.max_model_len, config.memory.max_total_tokens
    if asked is not None and asked > context:
        raise ConfigError(f"--max-model-len {asked:,} is more than the model's context of {context:,} tokens")
    wanted = asked or context
    # The last token of a sequence is given out, not cached.
    held = capacity.longest(pool, wanted - 1, most) + 1
    if held == wanted or (asked is None and held > 1):
        return held
    need = capacity.obstacle(pool, max(1, (asked or 2) - 1), most)
    shorter = "" if asked is None else f"; the longest that fits has {held:,} tokens: lower --max-model-len"
    raise ConfigError(f"one sequence of {asked or 2:,} tokens needs {need.text}: {need.remedy}{shorter}")


def available_memory() -> int:
    """Bytes of main memory that can be taken without pushing others out, cgroup limit included."""
    info = Path("/proc/meminfo")
    if info.is_file():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free
