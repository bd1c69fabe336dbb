"""Memory that was freed and that the C library keeps, given back to the operating system.

Buffers of a step have another size at every step, so glibc's heap is a sieve after a while: hundreds of megabytes that
nobody uses and that grow for hours. `malloc_trim` returns every whole page of it, wherever it lies.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

PERIOD = 30.0
"""Seconds of work between two trims: each takes up to a tenth of one, and what is given back must be faulted in."""


class Heap:
    """Trims after `PERIOD` seconds of work, and when the work has ended. Does nothing where there is no glibc."""

    def __init__(self, trim: Callable[[], object] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trim = trim or _malloc_trim()
        self._clock = clock
        self._last = clock()
        self._is_used = False  # since the last trim

    def note_step(self) -> None:
        """A step has run."""
        if not self._is_used:
            self._is_used, self._last = True, self._clock()  # work begins: the period counts from here
        if self._clock() - self._last > PERIOD:
            self.rest()

    def rest(self) -> None:
        """Nothing is to be done for a while."""
        if self._is_used:
            self._trim()
            self._is_used, self._last = False, self._clock()


def _malloc_trim() -> Callable[[], object]:
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if found is None else lambda: found(0)
