"""A loop with a wide frame never makes the interpreter fetch and return stack at every turn, however deep it lies."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

from isthmus.engine.wide_frame import wide_frame

TURNS = 300


def leaf() -> None:
    """Something that a loop calls."""


def branch() -> None:
    leaf()


def faults() -> int:
    """Pages that the system had to provide during a loop."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(TURNS):
        branch()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def deeper(slots: int, function: Callable[[], int]) -> int:
    """What a function returns when its caller's frame is so much wider."""

    def call() -> int:
        return function()

    code = call.__code__.replace(co_stacksize=call.__code__.co_stacksize + slots)
    found: int = FunctionType(code, globals(), closure=call.__closure__)()
    return found


def test_no_depth_costs_a_page_a_turn() -> None:
    wide = wide_frame(FunctionType(faults.__code__, globals()))

    def worst() -> int:
        return max(deeper(slots, wide) for slots in range(0, 2200, 4))

    with ThreadPoolExecutor(1) as pool:  # a stack of its own
        assert pool.submit(worst).result() < TURNS


def test_it_is_the_same_function() -> None:
    def add(a: int, *, b: int = 2) -> int:
        return a + b + len(names)

    names = ["x"]
    found = wide_frame(add)
    assert found is add
    assert found(1) == 4
    assert found(1, b=5) == 7
