"""Bounds on what torch keeps of matrix products on a CPU.

oneDNN compiles a product for every shape it meets, about half a megabyte each, and keeps the newest 1,024; torch's
bridge to it keeps as many descriptions that hold on to them. A server's batches have a new shape at almost every step:
hundreds of megabytes, which grow for hours because the pieces also cut up the C library's heap.
"""

from __future__ import annotations

import os

BOUNDS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    "LRU_CACHE_CAPACITY": "16",
}
"""Environment variables of oneDNN and of the bridge, and what they are here.

All shapes of one step must fit the first (some take two entries), as each layer uses them again: a handful of the
model's own, a pair for each bucket of decodes and each block of a chunk. Not finding one costs about half a
millisecond. The second saves nothing measurable (one row, or twenty shapes in turn: the same microseconds with 16
entries and with 1,024).
"""


def bound_product_caches() -> None:
    """Call before the first product of the process: they are read then. What the user has set stays."""
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
