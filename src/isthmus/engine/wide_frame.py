"""Room on the interpreter's stack for a loop that calls a lot.

CPython takes its stack from the system 16 KiB at a time: a call that finds no room maps a piece, and unmaps it when it
ends. A loop that happens to stand just there does so at every turn, and so may what it calls: a step of 256 decodes
then took 344 us of CPU time instead of 200, depending on how deep its caller was. A frame of half a MiB gets a piece of
its own, a whole one, and what is called from it has the rest; pages that nothing is written to take no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

_SLOTS = 1 << 16  # of eight bytes

F = TypeVar("F", bound=Callable[..., Any])


def wide_frame(function: F) -> F:
    """The same function with a frame of half a MiB: a decorator for the loops that drive an engine.

    Not for what is called often, since the piece is mapped at every call, nor for generators, whose frames lie
    elsewhere.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + _SLOTS)
    return cast("F", function)
