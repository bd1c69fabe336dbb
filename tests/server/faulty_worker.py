"""The engine process with the founding bug: a window group's page table as long as the group has pages of its own.

The full group's ids index it, and there are more of them. What was written past the end overwrote something, what was
read there was something else: here all ids past the end fall on the last entry, silently. As long as the server has not
used more ids than the window group has pages, every answer is right.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.engine import runner
from isthmus.memory import Op, Writes
from isthmus.server import worker


class ShortMirror(runner._Mirror):
    """Keeps the true table, so that all checks hold, and translates by a private short copy of it."""

    def apply(self, op: Op) -> None:
        """As always, and note the writes in the short copy."""
        super().apply(op)
        if isinstance(op, Writes) and self.group.kind == "window":
            if not hasattr(self, "short"):
                self.short = np.zeros(self.num_pages, np.int32)
            bound = op.physical > 0
            self.short[self._place(op.virtual[bound])] = op.physical[bound]

    def translate(self, virtual: NDArray[np.int32]) -> NDArray[np.int64]:
        """Physical pages by the short copy."""
        if self.group.kind != "window":
            return super().translate(virtual)
        return self.short[self._place(virtual)].astype(np.int64)

    def _place(self, virtual: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.minimum(virtual, self.num_pages - 1)


if __name__ == "__main__":
    runner._Mirror = ShortMirror  # type: ignore[misc]
    if torch.cuda.is_available():  # what serves a GPU needs Triton, which a CPU install may lack
        from isthmus.engine import gpu_backend
        from tests.engine.short_tables import ShortTables

        vars(gpu_backend)["DeviceRunner"] = ShortTables
    sys.exit(worker.main())
