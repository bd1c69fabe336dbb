"""A layer group as the pool sees it, where groups stand in the arena, and which of them bind every id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from isthmus.memory.spec import PageSpec

Kind: TypeAlias = Literal["append", "window", "state"]
SPACES: dict[Kind, str] = {"append": "tokens", "window": "tokens", "state": "states"}


@dataclass(frozen=True)
class Group:
    """A layer group as the pool sees it: how large its pages are and which id space names them."""

    name: str
    spec: PageSpec
    kind: Kind
    window: int | None = None  # tokens a window group keeps; None for the other kinds

    def __post_init__(self) -> None:
        if self.kind not in SPACES:
            raise ValueError(f"group {self.name!r}: unknown cache kind {self.kind!r}; one of {', '.join(SPACES)}")
        if (self.kind == "window") != (self.window is not None and self.window > 0):
            raise ValueError(f"group {self.name!r}: a window group, and only one, has a window of at least 1 token")

    @property
    def space(self) -> str:
        """The id space that names its pages: "tokens" or "states"."""
        return SPACES[self.kind]


def null_bytes(groups: Iterable[Group]) -> int:
    """Bytes at the start of an arena where the null pages (page 0) of all groups lie, overlapping."""
    return max(group.spec.page_bytes for group in groups)


def chain_order(groups: Sequence[Group]) -> list[Group]:
    """Low to high. What grows with every token takes the high end and per-sequence states the low one; windows float.

    An end that is left over goes to the widest page, because moving those costs most.
    """
    rest = sorted(groups, key=lambda g: g.spec.page_bytes)
    high = next((g for g in rest[::-1] if g.kind == "append"), None)
    low = next((g for g in rest[::-1] if g.kind == "state"), None)
    rest = [g for g in rest if g is not high and g is not low]
    if low is None and rest:
        low = rest.pop()
    if high is None and rest:
        high = rest.pop()
    return [g for g in (low, *rest, high) if g is not None]


def covering_groups(groups: Mapping[str, Group], space: str) -> tuple[str, ...]:
    """The groups that bind every live id of a space: its append or state groups, else its widest window."""
    members = [g for g in groups.values() if g.space == space]
    always = tuple(g.name for g in members if g.kind != "window")
    return always or (max(members, key=lambda g: g.window or 0).name,)
