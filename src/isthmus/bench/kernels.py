"""The GPU kernels against what the GPU can do: copy bandwidth and bf16 matrix products, measured in the same run.

decode      K and V bytes, each read once, over the time of a launch
prefill     operations of the two products over pairs that are not masked, over the time of a launch
pages       write_kv and copy_pages in bytes read and written; translate and scatter in microseconds
experts     pairs sorted and both products: bytes of the weights that are read, operations; torch's grouped products
            over rows gathered before (their gathering counts, their sorting does not)
layouts     decode and prefill over the design's pages and over others (`isthmus.bench.layouts`)
fp8         decodes, and chunks behind cached tokens, over pages of fp8

Rows lie at random places of an arena of 10 GB; launches go through its layers, so that the L2 does not help. A launch
is timed inside a CUDA graph of several. `--sweep` tries other builds of the attention kernels instead.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from isthmus.errors import ConfigError

ARENA_BYTES = 10 << 30
PAGE_SIZES = (16, 32, 64, 128)
_COPY_BYTES = 2 << 30
_COMPILE_SECONDS = 120.0
_SWEEP_SECONDS = 400.0

Row = dict[str, Any]
SECTIONS = ("decode", "prefill", "pages", "experts", "layouts", "fp8")
SWEPT = ("decode", "prefill", "fp8")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every section, or those asked for. One that fails does not take the results of the others with it."""
    wanted = args.only or SECTIONS
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: no such section, there are {', '.join(SECTIONS)}")
    if args.sweep and not set(SWEPT) & set(wanted):
        raise ConfigError(
            f"--sweep is for the sections {', '.join(SWEPT)}: name one of them in --only, or leave it out"
        )
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels measures a GPU, and torch sees none here: run it on a machine with one")
    from isthmus.bench.bandwidth import copy_bandwidth, matmul_flops  # noqa: PLC0415
    from isthmus.kernels.device import cores as multiprocessors  # noqa: PLC0415

    device = torch.device("cuda")
    cores = multiprocessors(device)
    copy = copy_bandwidth(device, _COPY_BYTES)
    result: dict[str, Any] = {
        "copy_gb_per_s": round(copy / 1e9, 1),
        "matmul_tflops": round(matmul_flops(device) / 1e12, 1),
        "multiprocessors": cores,
        "failed": {},
    }
    torch.cuda.empty_cache()
    arena = _fill(torch.empty(ARENA_BYTES, dtype=torch.uint8, device=device))
    for name, section in _sections(arena, cores, copy, wanted, sweeping=args.sweep).items():
        if name.endswith("fp8"):  # the last: bytes of other types are now and then no numbers of this one
            _fill(arena, torch.float8_e4m3fn)
        start = time.perf_counter()
        try:
            result[name] = section()
        except Exception as error:
            traceback.print_exc()
            result["failed"][name] = f"{type(error).__name__}: {str(error).strip():.300}"
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return result


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people: a table for each section."""
    yield f"copy {result['copy_gb_per_s']:,.0f} GB/s, bf16 matrix product {result['matmul_tflops']:,.0f} TFLOP/s"
    for name in SECTIONS:
        if name in result:
            yield from ("", name, *_table(result[name]))
    for name in (f"sweep {section}" for section in SWEPT):
        if name in result:
            from isthmus.bench.sweep import sweep_lines  # noqa: PLC0415

            yield from ("", name, *sweep_lines(result[name]))
    for name, problem in result["failed"].items():
        yield f"{name} failed: {problem}"


def _sections(
    arena: torch.Tensor, cores: int, copy: float, wanted: Sequence[str], *, sweeping: bool
) -> dict[str, Callable[[], list[Row]]]:
    from isthmus.bench import expert_cases, kernel_cases, page_kernels  # noqa: PLC0415 (Triton, which a CPU install may lack)
    from isthmus.bench.precompile import compile_all  # noqa: PLC0415
    from isthmus.bench.sweep import sweep  # noqa: PLC0415

    if sweeping:
        kinds = {name: cases for name, cases in kernel_cases.SWEEP.items() if name in wanted}
        each = _SWEEP_SECONDS / max(1, len(kinds))
        return {f"sweep {name}": partial(sweep, cases, arena, cores, each) for name, cases in kinds.items()}
    cases = {name: kernel_cases.CASES[name](PAGE_SIZES) for name in wanted if name in kernel_cases.CASES}
    for build, problem in compile_all([case for some in cases.values() for case in some], _COMPILE_SECONDS).items():
        print(f"not compiled ahead: {build}: {problem}", file=sys.stderr)
    found: dict[str, Callable[[], list[Row]]] = {
        name: partial(kernel_cases.measure, some, arena, cores, copy) for name, some in cases.items()
    }
    if "pages" in wanted:
        found["pages"] = partial(page_kernels.measure, arena, copy)
    if "experts" in wanted:
        found["experts"] = partial(expert_cases.measure, arena.device, copy)
    return {name: found[name] for name in SECTIONS if name in found}


def _fill(arena: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Noise of that type: what a GPU draws, and so how fast it runs, depends on its data."""
    noise = torch.randn(64 << 20, dtype=torch.bfloat16, device=arena.device).to(dtype).view(torch.uint8)
    for part in torch.split(arena, len(noise)):
        part.copy_(noise[: len(part)])
    return arena


def _table(rows: Iterable[Row]) -> Iterator[str]:
    rows = list(rows)
    columns = [name for name in rows[0] if name != "samples"]
    cells = [columns, *([_cell(row[name]) for name in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
