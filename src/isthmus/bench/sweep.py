"""Other builds of the attention kernels than the chosen ones: which is fastest for which shape."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from triton import next_power_of_2
from triton.runtime.errors import OutOfResources

from isthmus.bench.attention_cases import Case, Decode, Prefill, launches
from isthmus.bench.clock import gpu_time
from isthmus.bench.layouts import ITEMSIZE, Heads
from isthmus.bench.precompile import build_of, compile_all
from isthmus.kernels.attention import DecodeConfig, PrefillConfig

PROGRAMS = (1, 2, 3, 4)  # per multiprocessor
_SHARED_BYTES = 224 << 10  # of a multiprocessor, about
_ACCUMULATORS = 160  # registers of a thread for sums, of 255
_COMPILE_SECONDS = 150.0
_SHOWN = 4


def sweep(cases: Sequence[Case], arena: Tensor, cores: int, seconds: float) -> list[dict[str, Any]]:
    """Time every build of every case; a row per case: its rate by default, and its fastest builds.

    Stops when `seconds` are over, builds not yet tried left out and counted.
    """
    tries = {case: list(_tries(case)) for case in cases}
    deadline = time.monotonic() + seconds
    failed = compile_all([one for ones in tries.values() for one in ones], min(_COMPILE_SECONDS, seconds / 2))
    print(f"{len(failed)} builds failed", file=sys.stderr)
    rows = []
    for case, ones in tries.items():
        found: list[dict[str, Any]] = []
        problems: list[dict[str, Any]] = []
        for one in ones:
            problem = failed.get(build_of(one)) or ("no time left" if time.monotonic() > deadline else None)
            try:
                rate = None if problem else _rate(one, arena, cores)
            except OutOfResources as error:
                rate, problem = None, str(error)
            if rate is None:
                problems.append({"config": _config(one), "problem": problem})
            else:
                found.append({"rate": rate, "config": _config(one)})
        found.sort(key=lambda row: -row["rate"])
        default = next((row["rate"] for row in found if row["config"] == _config(case)), None)
        rows.append(_facts(case) | {"default": default, "best": found[:_SHOWN], "tried": found, "problems": problems})
    return rows


def sweep_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For people."""
    for row in rows:
        default = "failed" if row["default"] is None else f"{row['default']:,.0f}"
        yield f"{row['case']}: {default} {row['unit']} by default; {len(row['problems'])} builds not timed"
        yield from (f"    {best['rate']:>10,.0f}  {best['config']}" for best in row["best"])


def _tries(case: Case) -> Iterator[Case]:
    """The default build first."""
    yield case
    if isinstance(case, Decode):
        for config, programs in itertools.product((None, *_decode_configs(case.heads)), PROGRAMS):
            if config is not None or programs != case.programs:
                yield dataclasses.replace(case, config=config, programs=programs)
    else:
        for build in _prefill_configs(case.heads):
            yield dataclasses.replace(case, config=build)


def _decode_configs(heads: Heads) -> Iterator[DecodeConfig]:
    row = 2 * next_power_of_2(heads.dim) * heads.rows.itemsize
    for block_n, warps, stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        if block_n * row * (stages - 1) <= _SHARED_BYTES and block_n * 16 >= warps * 64:
            yield DecodeConfig(block_n, warps, stages)


def _prefill_configs(heads: Heads) -> Iterator[PrefillConfig]:
    dim = next_power_of_2(heads.dim)
    rows = (64, 128) if dim < 512 else (16, 32, 64)
    for block_m, block_n, warps, stages in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 4)):
        shared = (block_m + 2 * block_n * (stages - 1)) * dim * ITEMSIZE
        if shared <= _SHARED_BYTES and block_m * (dim + block_n) <= _ACCUMULATORS * 32 * warps:
            yield PrefillConfig(block_m, block_n, warps, stages)


def _rate(case: Case, arena: Tensor, cores: int) -> float:
    us = gpu_time(launches(case, arena, cores), samples=3).us
    return round(case.kv_bytes / us / 1e3 if isinstance(case, Decode) else case.operations / us / 1e6, 1)


def _config(case: Case) -> dict[str, Any]:
    config = {} if case.config is None else case.config._asdict()
    return config | ({"programs": case.programs} if isinstance(case, Decode) else {})


def _facts(case: Case) -> dict[str, Any]:
    heads, window = case.heads, "" if case.window is None else f", window {case.window}"
    if isinstance(case, Prefill):
        what = f"{heads.name} prefill of {case.sequences} x {case.chunk:,} after {case.past:,}{window}"
        return {"case": what, "page_size": case.page_size, "unit": "TFLOP/s"}
    what = f"{heads.name} decode of {case.sequences} x {case.cached:,}{window}"
    return {"case": what, "page_size": case.page_size, "unit": "GB/s"}
