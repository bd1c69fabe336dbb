"""What the device must do, in order: the only thing that crosses from the planner to an executor.

Apply the operations one after the other. Inside one `Moves` or `Copies` no destination overlaps a source
or a live page in bytes, so one gather and scatter (or one kernel launch) per operation is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Moves:
    """Whole pages change place: `arena[destination * page_bytes] = arena[source * page_bytes]`."""

    group: str
    source: Int32  # physical pages
    destination: Int32


@dataclass(frozen=True)
class Copies:
    """A fork or a snapshot: like Moves, but the source stays live."""

    group: str
    source: Int32
    destination: Int32


@dataclass(frozen=True)
class Writes:
    """Page table entries of the group: `table[virtual] = physical`; 0 unbinds."""

    group: str
    virtual: Int32
    physical: Int32


@dataclass(frozen=True)
class Frees:
    """Pages that nobody owns any more. Nothing has to be done; a device that poisons freed bytes does it here."""

    group: str
    page: Int32  # physical pages


Op: TypeAlias = Moves | Copies | Writes | Frees


@dataclass
class Delta:
    """Operations since the last `Pool.take_delta`, in the order they must be applied."""

    ops: list[Op] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ops)

    def moved_pages(self, group: str) -> int:
        """How many pages of a group change place."""
        return sum(len(op.source) for op in self.ops if isinstance(op, Moves) and op.group == group)
