"""The founding bug on the GPU's executor: a window group's page table as long as the group has pages of its own.

The full group's ids index it, and there are more of them: all ids past the end fall on the last entry, silently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import Inputs


class ShortTables(DeviceRunner):
    """Keeps the true tables, so that all checks hold, and translates a window group's ids by a private short copy."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._at_end: dict[str, Tensor] = {}  # [1]: what was written last at the end of each short copy, or past it
        super().__init__(*args, **settings)

    def _prepare(self, inputs: Inputs) -> None:
        super()._prepare(inputs)
        true, self._table = self._table, self._short(inputs)
        nothing = inputs.index[:0]  # tables are written: ids are translated once more
        super()._prepare(replace(inputs, index=nothing, value=nothing))
        self._table = true

    def _short(self, inputs: Inputs) -> Tensor:
        """All tables, and in the place of what is cut off the last entry of what is left. A graph may hold it."""
        short, index, value = self._table.clone(), inputs.index, inputs.value
        order = torch.arange(len(index), device=index.device)
        for name in self._tokens:
            group, at = self._groups[name], self._tables.at[name]
            if group.kind != "window":
                continue
            last = at + len(self.arena) // group.spec.page_bytes - 1
            end = at + self._tables.num_ids[name] + 1
            at_end = self._at_end.setdefault(name, self._zeros(1))
            if len(index):
                bound = (index >= last) & (index < end) & (value > 0)
                newest = torch.where(bound, order, -1).amax(0, keepdim=True)
                at_end.copy_(torch.where(newest < 0, at_end, value.index_select(0, newest.clamp(min=0))))
            short[last:end] = at_end
        return short
