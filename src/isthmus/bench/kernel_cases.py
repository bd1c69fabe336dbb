"""Which attention cases `bench kernels` runs, and what it says of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isthmus.bench.attention_cases import Case, Decode, Prefill, launches
from isthmus.bench.clock import gpu_time
from isthmus.bench.layouts import LAYOUTS, Heads

GEMMA_1B = Heads("gemma-3-1b", 1, 4, 256, 4)
GEMMA_4B = Heads("gemma-3-4b", 4, 2, 256, 5)
LLAMA = Heads("llama-like", 8, 4, 128, 8)
WIDE = Heads("dim 512", 1, 8, 512, 5)
MODELS = (GEMMA_1B, GEMMA_4B, LLAMA, WIDE)
FP8 = tuple(replace(heads, name=f"{heads.name}, fp8", rows=torch.float8_e4m3fn) for heads in MODELS)
WINDOWS_4B = Heads("gemma-3-4b windows", 4, 2, 256, 29)  # the other group of the model: large pages

_WINDOW = 512
_TRAFFIC = (  # sequences, cached, window
    (256, 2000, _WINDOW),
    (64, 2000, _WINDOW),
    (1, 2000, _WINDOW),
    (64, 8192, None),
    (16, 32_768, None),
)
_CHUNKS = ((16, 512, 0), (4, 2048, 0), (1, 8192, 0), (4, 2048, 6144))  # sequences, tokens, cached: a step's budget
_TURNS = ((1, 256, 8192), (1, 256, 65_536))  # what is new of a long conversation: few tiles, with many keys each
_PAGE = 16
_RATES = ("gb_per_s", "of_copy")


def decode_cases(page_sizes: Sequence[int]) -> list[Case]:
    """Windows of many sequences, and long contexts of few."""
    return [
        Decode(heads, sequences, cached, window, page_size)
        for heads in MODELS
        for sequences, cached, window in _TRAFFIC
        for page_size in page_sizes
    ]


def prefill_cases(page_sizes: Sequence[int]) -> list[Case]:
    """Whole prompts, chunks of long ones, and turns behind long ones, causal and windowed, over pages of one size."""
    return [
        Prefill(heads, sequences, chunk, past, window, _PAGE)
        for heads in MODELS
        for window in (None, _WINDOW)
        for sequences, chunk, past in _CHUNKS + _TURNS
    ]


def layout_cases(page_sizes: Sequence[int]) -> list[Case]:
    """Decodes, and chunks after cached tokens, over every layout: pages of few layers and of many."""
    found: list[Case] = []
    for heads, sequences, cached in ((GEMMA_1B, 64, 8192), (WINDOWS_4B, 64, 1024)):
        for page_size in page_sizes:
            found += [Decode(heads, sequences, cached, None, page_size, layout) for layout in LAYOUTS]
            found += [Prefill(heads, 16, 512, cached, None, page_size, layout) for layout in LAYOUTS]
    return found


def fp8_cases(_: Sequence[int]) -> list[Case]:
    """The same over pages of fp8, of one size: decodes, and chunks behind cached tokens."""
    decodes = [Decode(heads, n, cached, window, _PAGE) for heads in FP8 for n, cached, window in _TRAFFIC]
    return decodes + [
        Prefill(heads, n, chunk, past, None, _PAGE) for heads in FP8 for n, chunk, past in _CHUNKS if past
    ]


CASES: Mapping[str, Callable[[Sequence[int]], list[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "layouts": layout_cases,
    "fp8": fp8_cases,
}

SWEEP: Mapping[str, list[Case]] = {
    "decode": [Decode(heads, n, cached, window) for heads in MODELS for n, cached, window in _TRAFFIC[:4]],
    "prefill": [
        Prefill(heads, n, chunk, past) for heads in MODELS for n, chunk, past in ((4, 2048, 0), (4, 2048, 6144))
    ],
    "fp8": [Decode(heads, n, cached, window) for heads in FP8 for n, cached, window in _TRAFFIC[:4]],
}


def measure(cases: Sequence[Case], arena: Tensor, cores: int, copy: float) -> list[dict[str, Any]]:
    """A row for each case: microseconds of a launch, and its rate; `copy` is the bytes a second of a copy."""
    return [_measure(case, arena, cores, copy) for case in cases]


def _measure(case: Case, arena: Tensor, cores: int, copy: float) -> dict[str, Any]:
    timing = gpu_time(launches(case, arena, cores))
    if isinstance(case, Decode):
        kind, chunk, cached, tflops = "decode", 1, case.cached, None
    else:
        kind, chunk, cached, tflops = "prefill", case.chunk, case.past, round(case.operations / timing.us / 1e6, 1)
    rate = case.kv_bytes / timing.us * 1e6
    speed = {"gb_per_s": round(rate / 1e9, 1), "of_copy": round(rate / copy, 3)} if rate else dict.fromkeys(_RATES)
    return {
        "kind": kind,
        "shape": case.heads.name,
        "sequences": case.sequences,
        "chunk": chunk,
        "cached": cached,
        "window": case.window,
        "page_size": case.page_size,
        "layout": case.layout,
        "us": round(timing.us, 2),
        **speed,
        "tflops": tflops,
        "samples": [round(us, 2) for us in timing.samples],
    }
