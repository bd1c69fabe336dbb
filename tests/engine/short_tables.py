"""The founding bug on the GPU's executor: a window group's page table as long as the group has pages of its own.

The full group's ids index it, and there are more of them: all ids past the end fall on the last entry, silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from isthmus.engine.device_plan import DevicePlan
from isthmus.engine.device_runner import DeviceRunner


class ShortTables(DeviceRunner):
    """Keeps the true tables, so that all checks hold, and translates a window group's ids by a private short copy."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._at_end: dict[str, int] = {}  # what was written last at the end of each short copy, or past it
        super().__init__(*args, **settings)

    def _prepare(self, plan: DevicePlan, views: Mapping[str, Tensor], slots: Mapping[str, Tensor]) -> None:
        super()._prepare(plan, views, slots)
        true, self._table = self._table, self._short(plan)
        nothing = plan.index[:0]  # pages have moved, and tables are written: ids are translated once more
        super()._prepare(replace(plan, index=nothing, value=nothing, pages=()), views, slots)
        self._table = true

    def _short(self, plan: DevicePlan) -> Tensor:
        """All tables, and in the place of what is cut off the last entry of what is left."""
        short = self._table.clone()
        for name in self._tokens:
            group, at = self._groups[name], self._tables.at[name]
            if group.kind != "window":
                continue
            last = at + len(self.arena) // group.spec.page_bytes - 1
            end = at + self._tables.num_ids[name] + 1
            bound = plan.value[(plan.index >= last) & (plan.index < end) & (plan.value > 0)]
            if len(bound):
                self._at_end[name] = int(bound[-1])
            short[last:end] = self._at_end.get(name, 0)
        return short
