"""Who is the last of several programs to finish."""
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive_last(p_counter: tl.tensor, parts: tl.tensor) -> tl.tensor:
    """Whether this program is the last of `parts` to come here; the counter is 0 again then.

    The barriers make one thread's atomic speak for all threads: their stores before it, their loads after it.
    """
    tl.debug_barrier()
    last = tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(p_counter, 0)
    tl.debug_barrier()
    return last
