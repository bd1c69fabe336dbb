"""Compiles kernels of many cases at once, in processes that leave them in Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from isthmus.bench.attention_cases import Case, Decode, launches
from isthmus.bench.layouts import Layout

_ARENA_BYTES = 64 << 20
_MOST_WORKERS = 14


def build_of(case: Case) -> Case:
    """The smallest case that needs the same kernel; equal for cases that share one.

    Lengths, the window's size, programs, and where pages lie are no constants of a kernel.
    """
    by_token = "token" in case.layout  # in pages of one token, then
    layout: Layout = "token-major" if by_token else "page-major"
    page_size = 1 if by_token else case.page_size
    if isinstance(case, Decode):
        return replace(case, sequences=2, cached=256, window=None, page_size=page_size, layout=layout, programs=1)
    window = None if case.window is None else 64
    return replace(case, sequences=2, chunk=128, past=128, window=window, page_size=page_size, layout=layout)


def compile_all(cases: Sequence[Case], seconds: float) -> dict[Case, str]:
    """Compile what these cases need; the builds that failed or took too long, with one line each.

    Whoever runs a case later finds its kernel in the cache.
    """
    builds = list(dict.fromkeys(map(build_of, cases)))
    if not builds:  # sections that time no attention
        return {}
    deadline = time.monotonic() + seconds
    failed: dict[Case, str] = {}
    workers = min(_MOST_WORKERS, os.cpu_count() or 1, len(builds))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:  # whose end terminates what still runs
        pending = [(build, pool.apply_async(_compile, (build,))) for build in builds]
        for build, result in pending:
            try:
                problem = result.get(max(0.01, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                problem = f"not compiled within {seconds:.0f} s"
            if problem is not None:
                failed[build] = problem
    return failed


def _compile(build: Case) -> str | None:
    """Launch it once, in a process of its own. What goes wrong is said, not raised: errors of Triton do not pickle."""
    try:
        arena = torch.zeros(_ARENA_BYTES, dtype=torch.uint8, device="cuda")
        launches(build, arena, 4)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]:.200}"
    return None
