"""The prefix cache: full pages of earlier sequences, found again by what they hold.

    match -> acquire     how much of a prompt every kind can restore; use it
    insert, keep         a sequence's new full pages become shared; somebody may come back to this boundary
    unlock               a sequence needs pages no more (its window passed them, or it ended)
    evict                give back what is worth least until a demand can be met, and not a page more

A page of tokens is one node of a chain (names.py, nodes.py). Its id belongs to the cache, and sequences that use it
hold locks on it, one kind of lock per window group besides the one on the id itself (holdings.py): a page whose
window has passed can be evicted while the id is in use. Partial pages stay with their sequence. A state belongs to
its sequence always; what is cached is a copy, a snapshot at a page boundary.

A sequence's boundary b (tokens [0, b * page_size)) can be restored when every kind can:

    append    all columns before b are bound
    window    the columns that a query at b reads are bound
    state     there is a snapshot at b exactly
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.holdings import Bool, Holdings, Ids
from isthmus.cache.names import Namer, Names
from isthmus.cache.nodes import Slots
from isthmus.cache.ranking import Batch, Ranking
from isthmus.cache.roles import Roles
from isthmus.memory import Pool

Price: TypeAlias = Callable[[Mapping[str, int], Mapping[str, int]], object]
"""`Pool.could`, or what its owner asks instead: is the demand met (truthy) if these pages were released first?"""


@dataclass(frozen=True)
class Match:
    """What a lookup found. Good until something is evicted."""

    columns: int  # pages of every kind that can be restored: the hit
    known: int  # pages whose tokens are known to the cache, restorable or not
    ids: NDArray[np.int32]  # [columns], for the block table; 0 for columns that no group needs any more
    starts: Mapping[str, int]  # per lock on tokens: the first column that it is taken on
    snapshot: int  # id of the state to copy, 0 where there is none
    per_kind: Mapping[str, int]  # tokens that each group could have restored by itself
    cut_by: str | None  # the group that restores least, when that is less than is known
    slots: Slots  # nodes of the hit
    epoch: int
    changes: int
    sought: bytes | None  # the first name that is not known; None: all of them are

    @property
    def branch(self) -> int:
        """The column where a chunk should end, so that the next lookup of this kind finds a restore point; or 0."""
        return self.known if self.known > self.columns else 0


class PrefixCache:
    """Shared pages of one pool.

    Args:
        pool: the arena's bookkeeping. What is neither a sequence's nor the cache's must not be live in it.
        page_size: tokens per column; that of the token groups.

    A page that is pinned must be locked too, or private and not inserted yet: the cache knows nothing of pins.
    """

    def __init__(self, pool: Pool, page_size: int) -> None:
        self.roles = Roles.of(pool, page_size)
        self.evicted = dict.fromkeys(pool.groups, 0)  # pages, since the start
        self._pool = pool
        self._namer = Namer(page_size)
        self._holdings = Holdings(pool, self.roles)
        self._nodes = self._holdings.nodes
        self._clock = 0  # counts uses of nodes: the time of "last use"
        self._lookups = 0  # that led to a use
        self._epoch = 0  # counts evictions; a match of another count is stale
        self._changes = 0  # times that nodes which were there got something they did not hold
        self._ranking: Ranking | None = None
        self._touched = 0  # pages used or unlocked since the ranking was made

    # -- asking ---------------------------------------------------------------------------------------------

    def names(self, salt: str | None = None) -> Names:
        """A chain of names for one sequence. Prefixes of different salts never meet."""
        return Names(self._namer, salt)

    def match(self, names: Names, tokens: int) -> Match:
        """The longest boundary that every kind can restore for a sequence of so many tokens, of which the last is
        always computed. Changes nothing. Cost: the pages of the prompt."""
        roles, page_size = self.roles, self.roles.page_size
        most = max(0, tokens - 1) // page_size
        if not most or not self._nodes.get(names.pages[0]):
            return self._no_match(names.pages[0] if most else None)
        slots = self._nodes.find(names.pages[:most])
        known = len(slots)
        boundaries = np.arange(1, known + 1)
        every = np.ones(known, np.bool_)
        per_kind: dict[str, int] = {}
        for name, kind in roles.kinds.items():
            there = self._holdings.bound(name, slots)
            if name not in roles.states:
                gap = np.maximum.accumulate(np.where(there, 0, boundaries))  # the last boundary whose page is missing
                there = gap <= kind.dead(boundaries * page_size)
            per_kind[name] = _longest(there) * page_size
            every &= there
        columns = _longest(every)
        end = np.array([columns * page_size])
        starts = {name: int(roles.kinds[name].dead(end)[0]) for name in roles.locks if name not in roles.states}
        ids = self._nodes.page[slots[:columns]].astype(np.int32)
        ids[: starts[roles.covering[0]] if roles.covering else columns] = 0
        snapshot = int(self._nodes.snapshot[slots[columns - 1]]) if columns else 0
        cut_by = min(per_kind, key=lambda name: per_kind[name]) if columns < known else None
        sought = names.pages[known] if known < most else None
        counts = self._epoch, self._changes
        return Match(columns, known, ids, starts, snapshot, per_kind, cut_by, slots[:columns], *counts, sought)

    def still(self, match: Match) -> bool:
        """Would the same lookup find the same? False if it is not known without asking."""
        same = not match.known or (match.epoch, match.changes) == (self._epoch, self._changes)
        return same and (match.sought is None or not self._nodes.get(match.sought))

    def want(self, match: Match) -> None:
        """Somebody waits to start from this hit: it counts as used now."""
        self._clock += 1
        self._nodes.last[match.slots] = self._clock

    def would_lock(self, matches: Sequence[Match]) -> dict[str, int]:
        """Pages per group, of those that nobody uses, that sequences would use which started from these hits."""
        taken: dict[str, int] = {}
        for lock in self.roles.locks:
            if lock in self.roles.states:
                ids = np.array([match.snapshot for match in matches if match.snapshot], np.int64)
            else:
                ids = np.concatenate([match.ids[match.starts[lock] :] for match in matches])
            taken |= self._holdings.newly(lock, ids)
        return taken

    def _no_match(self, sought: bytes | None) -> Match:
        none = np.zeros(0, np.int64)
        starts = {name: 0 for name in self.roles.locks if name not in self.roles.states}
        per_kind = dict.fromkeys(self.roles.kinds, 0)
        counts = self._epoch, self._changes
        return Match(0, 0, none.astype(np.int32), starts, 0, per_kind, None, none, *counts, sought)

    def lacks_snapshot(self, names: Names, columns: int) -> bool:
        """Would a snapshot of the states at this boundary be news?"""
        slot = self._nodes.get(names.pages[columns - 1]) if columns else 0
        return bool(self.roles.states) and columns > 0 and not self._nodes.snapshot[slot]

    @property
    def idle(self) -> Mapping[str, int]:
        """Pages per group that nobody uses: what could be evicted at most."""
        return self._holdings.idle

    def is_idle(self, group: str, ids: Ids) -> Bool:
        """Which of these ids have a page in the group that nobody uses, so that it could be evicted. Ids with a page
        there, or 0."""
        return self._holdings.is_idle(group, ids)

    def ids(self, space: str) -> Slots:
        """The virtual ids of a space that the cache owns, ascending."""
        return np.flatnonzero(self._holdings.slot_of[space])

    def __len__(self) -> int:
        return len(self._nodes)

    # -- using ----------------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> NDArray[np.int32]:
        """Lock a hit for a sequence and its snapshot until it is copied. Returns the ids of its first columns.

        The sequence holds lock `name` on columns [starts[name], columns) and gives each back with `unlock` once.
        """
        assert match.epoch == self._epoch, "something was evicted since this match: match again"
        self._lookups += 1
        self._touch(match.slots)
        for name, start in match.starts.items():
            self._holdings.lock(name, match.ids[start:])
        if match.snapshot:
            self._holdings.lock(self.roles.states[0], np.array([match.snapshot]))
        return match.ids

    def cancel(self, match: Match) -> None:
        """Undo an `acquire`: the sequence does not run after all."""
        for name in sorted(match.starts, key=lambda name: name in self.roles.covering):
            self.unlock(name, match.ids[match.starts[name] :])
        if match.snapshot:
            self.unlock(self.roles.states[0], np.array([match.snapshot]))

    def insert(self, chains: Sequence[Names], first: Slots, end: Slots, ids: Ids) -> NDArray[np.int32]:
        """Full pages that sequences have computed become nodes, locked by their sequences in every group.

        Args:
            chains: of the sequences.
            first, end: their columns [first[i], end[i]), that no window has passed yet and whose earlier columns were
                inserted before.
            ids: the sequences' own ids of those columns, one sequence after the other; 0 where they have no page in
                any group.

        Returns the ids the block tables must hold instead. Where they differ, the page was there already: the
        sequence now uses that one, which has got the window pages that it lacked, and the own id is released.
        """
        assert len(ids) == np.add.reduce(end - first), "as many ids as columns"
        own = np.asarray(ids, np.int64)
        result = own.astype(np.int32)
        pages, held = [names.pages for names in chains], own > 0
        gaps = np.count_nonzero(held) < len(held)
        if gaps or np.count_nonzero(end == first):  # every column by itself
            which = np.repeat(np.arange(len(pages)), end - first)
            column = np.arange(len(which)) + (first - np.cumsum(end - first) + end - first)[which]
            own, which, first = own[held], which[held], column[held]
            pages, end = [pages[i] for i in which.tolist()], first + 1
        if not len(own):
            return result
        self._changes += not self.roles.chained  # a mark may get a page
        slots = self._nodes.reach_all(pages, first, end, self._clock + 1)
        new = (self._nodes.page[slots] == 0).nonzero()[0]
        if len(set(slots[new].tolist())) < len(new):
            new = np.sort(new[np.unique(slots[new], return_index=True)[1]])  # the first of two that bring the same
        self._holdings.adopt("tokens", own[new], slots[new], locked=True)
        used = self._nodes.page[slots]
        if len(new) < len(slots):
            known = np.ones(len(slots), np.bool_)
            known[new] = False
            for name in self.roles.token_locks:
                self._holdings.lock(name, used[known])
        self._touch(slots)
        self._touched -= len(new)  # no ranking has what is new and locked
        again = used != own
        if np.count_nonzero(again):
            self._deduplicate(own[again], used[again])
            result[result > 0] = used
        return result

    def keep(self, names: Names, columns: int, snapshot: int = 0) -> None:
        """Somebody may come back to this boundary of a sequence whose pages are inserted and locked.

        For the ends of prompts and requests, for branches, for where a chunk was cut. `snapshot` is a private id with
        the states at the boundary; the cache takes it, or releases it when it has one.
        """
        if snapshot and not self.roles.covering:
            self._clock += 1
            self._nodes.reach(names.pages, columns, self._clock)
        slot = self._nodes.get(names.pages[columns - 1]) if columns else 0
        if slot:
            self._nodes.restore[slot] = True
        if snapshot and slot and not self._nodes.snapshot[slot]:
            self._changes += 1
            self._holdings.adopt("states", np.array([snapshot]), np.array([slot]))
        elif snapshot:
            self._pool.release("states", [snapshot])

    def unlock(self, lock: str, ids: Ids) -> Bool:
        """Sequences need these no more: a window group's pages (the window has passed), or the ids (they end).

        Locks of windows are given back before that of the ids. Returns which of the ids are not the cache's: those
        are the caller's to unbind or release. Ids are of one or many sequences and not 0.
        """
        slots = self._holdings.slot_of[self._holdings.space(lock)][ids].astype(np.int64)
        private: Bool = slots == 0
        shared = ids
        if np.count_nonzero(private):
            shared, slots = ids[~private], slots[~private]
        if len(shared):
            self._holdings.unlock(lock, shared)
            if lock in self.roles.covering:
                self._touch(slots)
        return private

    # -- giving back ----------------------------------------------------------------------------------------

    def evict(self, demand: Mapping[str, int], price: Price | None = None) -> bool:
        """Make room for a demand by evicting what is worth least, and not a candidate more than it takes.

        True when the demand can be met now. False, and nothing was evicted, if evicting everything would not help.
        """
        ask = price or self._pool.could
        if ask(demand, {}):
            return True
        if not ask(demand, self.idle):
            return False
        old = self._ranking
        if old is not None and self._touched <= max(64, len(self) // 8) and self._evict(old, demand, ask):
            return True
        return self._evict(self._rank(), demand, ask)

    def reset(self) -> None:
        """Evict everything that nobody uses."""
        *_, everything = self._rank().batches()
        self._drop(everything, len(everything))
        self._ranking = None

    def distrust(self) -> None:
        """What is here may be wrong: evict what nobody uses, and find the rest never again.

        Sequences that use some of it may have read it, and must neither insert nor keep anything under the names they
        have: they need new ones, when they start again.
        """
        self.reset()
        self._changes += 1
        self._nodes.hide()

    def bury(self) -> None:
        """After a fault: forget ids that somebody else has given back."""
        self._changes += 1
        for slot in self._holdings.bury().tolist():
            self._nodes.prune(slot)

    def check(self, private: Mapping[str, Ids] | None = None) -> None:
        """Assert every equation. `private[space]`: the ids that sequences own; then also that each live id has one
        owner."""
        self._holdings.check()
        for space, ids in (private or {}).items():
            owned = np.sort(np.concatenate((self.ids(space), np.asarray(ids, np.int64))))
            live = np.asarray(self._pool.ids(space).live_ids())
            assert np.array_equal(owned, live), f"ids of {space!r}: {len(live)} live, {len(owned)} owned"

    # -- inside ---------------------------------------------------------------------------------------------

    def _touch(self, slots: Slots) -> None:
        self._clock += 1
        self._nodes.last[slots] = self._clock
        self._touched += len(slots)

    def _deduplicate(self, own: Slots, theirs: Slots) -> None:
        for name in self.roles.windows:
            wanted = self._pool.is_bound(name, own) & ~self._pool.is_bound(name, theirs)
            source, target = own[wanted], theirs[wanted]
            first = np.unique(target, return_index=True)[1]
            if len(first):
                self._changes += 1
                self._pool.rebind(name, source[first], target[first])
        self._pool.release("tokens", own)

    def _rank(self) -> Ranking:
        self._ranking = Ranking(self._holdings, self._clock, self._lookups)
        self._touched = 0
        return self._ranking

    def _evict(self, ranking: Ranking, demand: Mapping[str, int], ask: Price) -> bool:
        for batch in ranking.batches():
            if ask(demand, batch.pages(len(batch))):
                break
        else:
            return False
        low, high = 1, len(batch)
        while low < high:
            middle = (low + high) // 2
            if ask(demand, batch.pages(middle)):
                high = middle
            else:
                low = middle + 1
        self._drop(batch, low)
        ranking.drop(low)
        return True

    def _drop(self, batch: Batch, n: int) -> None:
        """Evict the first n candidates."""
        roles, holdings = self.roles, self._holdings
        for name, pages in batch.pages(n).items():
            self.evicted[name] += pages
        dying = batch.freed(n, roles.covering[0]) if roles.covering else np.zeros(0, np.int64)
        for name in roles.windows:
            self._pool.unbind(name, holdings.forget(name, batch.freed(n, name)))
        if len(dying):
            self._pool.release("tokens", holdings.disown("tokens", dying))
        states = batch.freed(n, roles.states[0]) if roles.states else dying[:0]
        if len(states):
            self._pool.release("states", holdings.disown("states", states))
        if roles.chained:  # whoever holds nothing has lost the page now, as has all below
            self._nodes.remove(dying)
        else:
            for slot in np.concatenate((dying, states)).tolist():
                self._nodes.prune(slot)
        self._epoch += 1


def _longest(there: Bool) -> int:
    """The highest boundary (1-based) that is there; 0 for none."""
    found = np.flatnonzero(there)
    return int(found[-1]) + 1 if len(found) else 0
