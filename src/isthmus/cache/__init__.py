"""Caching policy: what each kind of layer keeps, for how long. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from isthmus.cache.append import Append
from isthmus.cache.kind import CacheKind, Columns, Space
from isthmus.cache.state import State
from isthmus.cache.window import Window
from isthmus.memory import Group


class MakeKind(Protocol):
    """Makes the policy for a group's pages; `keep_boundary` also keeps what a prefix cache restores (see Window)."""

    def __call__(self, group: Group, *, keep_boundary: bool = False) -> CacheKind: ...


KINDS: Mapping[str, MakeKind] = {
    "append": Append.of,
    "window": Window.of,
    "state": State.of,
}
"""Every cache kind by the label a group bears.

A new policy over pages is one file and one line here; where its pages lie and which id space names them is told by
`isthmus.memory.group`.
"""


def kind_of(group: Group, *, keep_boundary: bool = False) -> CacheKind:
    """The policy for a group's pages. KeyError for a label that is not registered."""
    return KINDS[group.kind](group, keep_boundary=keep_boundary)


__all__ = ["KINDS", "Append", "CacheKind", "Columns", "Space", "State", "Window", "kind_of"]
