"""What each group of a pool is to the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from isthmus.cache import kind_of
from isthmus.cache.kind import CacheKind
from isthmus.memory import Pool


@dataclass(frozen=True)
class Roles:
    """Groups by what evicting a page of theirs takes: the id, the page alone, or a snapshot.

    Locks are counted once for all groups of `covering` and once for all of `states`, under the first name of each.
    """

    page_size: int  # tokens of a column
    covering: tuple[str, ...]  # token groups that bind every live id; () in a model of states alone
    windows: tuple[str, ...]  # the other token groups: their pages come and go while the id lives
    states: tuple[str, ...]  # a snapshot is one id with a page in each
    spans: tuple[str, ...]  # every window group, a covering one included
    kinds: Mapping[str, CacheKind]  # what a query reads, to the column
    page_bytes: Mapping[str, int]

    @classmethod
    def of(cls, pool: Pool, page_size: int) -> Roles:
        """Sort the groups of a pool. ValueError if the token groups do not have this page size."""
        tokens = [g for g in pool.groups.values() if g.space == "tokens"]
        for group in tokens:
            if group.spec.page_size != page_size:
                raise ValueError(
                    f"group {group.name!r} has {group.spec.page_size} tokens a page, the prefix cache {page_size}: "
                    "token groups that share ids need one page size"
                )
        covering = pool.covering.get("tokens", ())
        return cls(
            page_size,
            covering,
            tuple(g.name for g in tokens if g.name not in covering),
            pool.covering.get("states", ()),
            tuple(g.name for g in tokens if g.kind == "window"),
            {name: kind_of(group) for name, group in pool.groups.items()},
            {name: group.spec.page_bytes for name, group in pool.groups.items()},
        )

    @cached_property
    def chained(self) -> bool:
        """Is a page of no use without all pages before it? Then ids die from the leaves up."""
        return bool(self.covering) and self.covering[0] not in self.spans

    @cached_property
    def locks(self) -> tuple[str, ...]:
        """The groups under whose names locks are counted."""
        return (*self.covering[:1], *self.windows, *self.states[:1])

    @cached_property
    def token_locks(self) -> tuple[str, ...]:
        """Those on pages of tokens."""
        return (*self.covering[:1], *self.windows)

    @cached_property
    def _counted(self) -> Mapping[str, tuple[str, ...]]:
        together = {name: names for names in (self.covering, self.states) for name in names}
        return {lock: together.get(lock, (lock,)) for lock in (*self.covering, *self.windows, *self.states)}

    def counted(self, lock: str) -> tuple[str, ...]:
        """The groups whose pages a lock of this name holds."""
        return self._counted[lock]
