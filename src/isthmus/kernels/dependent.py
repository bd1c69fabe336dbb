"""Kernels that begin before the one before them has ended (programmatic dependent launch, from Hopper on).

Such a launch says `**dependent_launch()`, and its kernel is built with DEPENDENT. It lets the kernel after it begin as
soon as all its programs have (`let_next`), and comes to `wait_for_previous`, in every program, before it reads what a
kernel of the forward may have written, or writes anything. All kernels of the forward before it have ended then: those
between two ordinary launches each wait for the one before, and an ordinary launch waits for everything.

Before it waits a kernel may read what no kernel of the forward writes, and what lies behind an ordinary launch: work
and tables, which are written before the tokens are embedded.
"""
# ruff: noqa: N803 - compile-time constants of kernels are in capitals
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9  # of compute capability


@functools.cache
def is_dependent() -> bool:
    """Whether the GPU that torch uses can; not under Triton's interpreter."""
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= _HOPPER


def dependent_launch(wanted: bool = True) -> dict[str, bool]:
    """Options of a launch, DEPENDENT among them. `wanted` only where the GPU can."""
    return {"DEPENDENT": True, "launch_pdl": True} if wanted and is_dependent() else {"DEPENDENT": False}


@triton.jit
def let_next(DEPENDENT: tl.constexpr) -> None:
    """Let the kernel after this one begin, once all programs of this one have come here."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr) -> None:
    """Until all kernels before this one have ended and what they wrote can be read."""
    if DEPENDENT:
        gdc_wait()
