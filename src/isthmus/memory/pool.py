"""The pool: all id spaces and groups of one arena, under one predicate, changed at one door each.

    plan -> commit      pages for a demand, all or nothing; nothing changes before commit
    unbind, release     a window has passed / an id dies
    copy, pin, compact  states are copied, transfers hold addresses, holes are closed

What is here is what groups do together. What one group has is in bindings.py and region.py, what chains of regions can
hold in arena.py, the answers to a demand in plan.py. Their equations are asserted by `check`, with

    live + holes + gaps + null + tail = arena                  in bytes

Every call validates first and changes afterwards, so a call that raises leaves the pool as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.arena import Chain, Span, build_chains
from isthmus.memory.bindings import Bindings
from isthmus.memory.delta import Copies, Delta, Op
from isthmus.memory.group import Group, chain_order, covering_groups, null_bytes
from isthmus.memory.ids import IdSpace, PageTable, PhysicalPages, VirtualLike, VirtualPages, as_physical, as_virtual
from isthmus.memory.journal import Journal
from isthmus.memory.plan import Plan, Refusal, StalePlanError
from isthmus.memory.usage import ArenaUsage

_NONE: Mapping[str, int] = {}
_NO_BINDS: Mapping[str, VirtualLike] = {}


class Pool:
    """All bookkeeping of one arena. No bytes of the arena are touched here; `take_delta` says what to do to them.

    Args:
        arena_bytes: size of the arena.
        groups: layer groups, any order; names must differ.
        walls: bytes per group for `--memory static`; together with the null pages at most the arena.
        journal: where every change is written, or None.
    """

    def __init__(
        self,
        arena_bytes: int,
        groups: Sequence[Group],
        *,
        walls: Mapping[str, int] | None = None,
        journal: Journal | None = None,
    ) -> None:
        if not groups or len({g.name for g in groups}) != len(groups):
            raise ValueError("a pool needs at least one group, and every group its own name")
        self.arena_bytes = arena_bytes
        self.null_bytes = null_bytes(groups)
        for group in groups:
            if arena_bytes // group.spec.page_bytes >= 2**31:
                raise ValueError(
                    f"group {group.name!r}: more than 2**31 pages of {group.spec.page_bytes} bytes: raise page_size"
                )
        if arena_bytes < self.null_bytes:
            raise ValueError(f"an arena of {arena_bytes} bytes cannot hold even the null page of {self.null_bytes}")
        self.groups = {g.name: g for g in chain_order(groups)}
        self.walls = dict(walls) if walls is not None else None
        self.chains = build_chains(list(self.groups.values()), arena_bytes, self.walls)
        self.regions = {r.name: r for chain in self.chains for r in chain.regions}
        self.covering = {space: covering_groups(self.groups, space) for space in sorted({g.space for g in groups})}
        self.spaces = {space: IdSpace(space, self._capacity(names)) for space, names in self.covering.items()}
        self.bindings = {
            g.name: Bindings(g, self.regions[g.name], self.spaces[g.space], g.name in self.covering[g.space])
            for g in self.groups.values()
        }
        self.tables = {name: bindings.table for name, bindings in self.bindings.items()}
        self.moved_pages = dict.fromkeys(self.groups, 0)  # since the start, per group
        self.refusals = 0  # demands that were turned away, since the start
        self._epoch = 0  # counts changes; a plan made at another count is stale
        self._ops: list[Op] = []  # since the last take_delta
        self._journal = journal
        if journal is not None:
            journal.begin(self)

    # -- asking ---------------------------------------------------------------------------------------------

    def plan(self, demand: Mapping[str, int], release: Mapping[str, int] = _NONE) -> Plan | Refusal:
        """Can so many pages per group be had, all or nothing? Changes nothing.

        Asking is free, and searches ask often: nothing is counted. Whoever acts on a Refusal calls `refused`.

        `release` asks "if so many live pages of these groups were given back first" (for eviction and
        preemption); such a plan answers the question and cannot be committed.
        """
        want = self._vector(demand, "demand")
        back = self._vector(release, "release") if release else {}
        need = {name: self.regions[name].live + want[name] - back.get(name, 0) for name in self.groups}
        if release and any(back[name] > self.regions[name].live for name in self.groups):
            raise ValueError(f"release {dict(release)}: more pages than are live")
        spans = []
        for chain in self.chains:
            sizes = [need[r.name] for r in chain.regions]
            found = chain.fit(sizes, (False,) * len(sizes)) if release else chain.arrange(sizes)
            if found is None:
                return Refusal.of(want, need, self.chains, self.arena_bytes)
            spans.append(tuple(found))
        fresh = (
            {space: self.spaces[space].peek(self._fresh(space, want)) for space in self.spaces} if not release else {}
        )
        return Plan(want, fresh, tuple(spans), -1 if release else self._epoch)

    def could(self, demand: Mapping[str, int], release: Mapping[str, int] = _NONE) -> bool:
        """Would `plan` find a way? It is cheaper to ask just this."""
        assert min(demand.values(), default=0) >= 0, f"demand {dict(demand)}: below 0"
        live = self.regions
        assert all(n <= live[name].live for name, n in release.items()), f"release {dict(release)}: more than are live"
        for chain in self.chains:
            if not chain.holds([r.live + demand.get(r.name, 0) - release.get(r.name, 0) for r in chain.regions]):
                return False
        return True

    def fits(self, demand: Mapping[str, int]) -> bool:
        """Would the demand fit this arena if it were empty?"""
        want = self._vector(demand, "demand")
        return all(chain.emptied().arrange([want[r.name] for r in chain.regions]) is not None for chain in self.chains)

    def table(self, group: str) -> PageTable:
        """The page table of a group: the one door from virtual to physical."""
        return self.tables[group]

    def ids(self, space: str) -> IdSpace:
        """The id space "tokens" or "states"."""
        return self.spaces[space]

    @property
    def capacities(self) -> dict[str, int]:
        """Ids of each id space, live and free."""
        return {name: ids.capacity for name, ids in self.spaces.items()}

    def num_pages(self, group: str) -> int:
        """Length of every arena view of the group, null page included."""
        return self.arena_bytes // self.groups[group].spec.page_bytes

    def is_bound(self, group: str, ids: VirtualLike) -> NDArray[np.bool_]:
        """Which ids have a page in the group. IndexError for ids outside the space."""
        bound: NDArray[np.bool_] = self.tables[group].pages(ids) != 0
        return bound

    def owners(self, group: str, pages: PhysicalPages) -> VirtualPages:
        """The virtual id that owns each physical page, 0 for nobody. TypeError for untranslated ids."""
        return self.bindings[group].owners(pages)

    def usage(self, cached: Mapping[str, int] = _NONE) -> ArenaUsage:
        """The arena in bytes; always sums. `cached`: how many of the owned pages per group nobody uses."""
        return ArenaUsage.of(self.chains, self.arena_bytes, cached)

    # -- changing -------------------------------------------------------------------------------------------

    def commit(self, plan: Plan | Refusal, binds: Mapping[str, VirtualLike] = _NO_BINDS) -> None:
        """Carry out a plan: mint `plan.ids`, move what must move, bind one page to each id of `binds[group]`.

        A covering group binds `plan.ids` of its space and may be left out of `binds`; any other group binds
        exactly `plan.demand[group]` ids that are fresh or live and have no page there.
        StalePlanError if the pool changed since; ValueError, IndexError or TypeError for wrong binds.
        """
        if isinstance(plan, Refusal):
            raise ValueError(f"a refusal cannot be committed: {plan.message}")
        if plan.epoch != self._epoch:
            raise StalePlanError("the pool changed after this plan was made (or it was a what-if): plan again")
        chosen = self._check_binds(plan, binds)
        self._epoch += 1
        for space, fresh in plan.ids.items():
            self.spaces[space].mint(len(fresh))
        start = len(self._ops)
        for chain, spans in zip(self.chains, plan.spans, strict=True):
            self._move(chain, spans)
            for region, span in zip(chain.regions, spans, strict=True):
                ids = chosen[region.name]
                if len(ids):
                    self._ops.append(self.bindings[region.name].bind(ids, *span))
                region.trim()
        if self._journal is not None:
            self._journal.commit(plan.demand, plan.ids, chosen, self._ops[start:])

    def refused(self, refusal: Refusal) -> None:
        """Note that a demand was turned away: counted, and written to the journal."""
        self.refusals += 1
        if self._journal is not None:
            self._journal.refusal(refusal.demand)

    def unbind(self, group: str, ids: VirtualLike) -> None:
        """Give back the pages of these ids in a group that does not cover its space; the ids stay live."""
        bindings = self.bindings[group]
        if bindings.covers:
            raise ValueError(f"group {group!r} binds every live id: release the ids instead")
        index = bindings.space.require_live(ids)
        pages = bindings.require_bound(index)
        bindings.require_movable(pages)
        self._epoch += 1
        self._ops += bindings.free(index, pages)
        if self._journal is not None:
            self._journal.unbind(group, index)

    def release(self, space: str, ids: VirtualLike) -> None:
        """The ids die: every group of the space gives back their pages. A second release raises."""
        index = self.spaces[space].require_live(ids)
        held = [(b, b.pages(index)) for b in self.bindings.values() if b.space.name == space]
        for bindings, pages in held:
            bindings.require_movable(pages)
        self._epoch += 1
        for bindings, pages in held:
            bound = pages != 0
            self._ops += bindings.free(index[bound], pages[bound])
        self.spaces[space].retire(index)
        if self._journal is not None:
            self._journal.release(space, index)

    def copy(self, group: str, source: VirtualLike, destination: VirtualLike) -> None:
        """Copy whole pages between bound ids of a group: a state forks or is saved. No destination is a source."""
        bindings = self.bindings[group]
        to = bindings.space.require_live(destination)
        origin = as_virtual(source)
        bindings.space.is_live(origin)
        if len(origin) != len(to) or np.isin(to, origin).any():
            raise ValueError(f"group {group!r}: a copy needs as many sources as destinations, and none that is both")
        pages = bindings.pages(np.concatenate((origin, to)))
        if (pages == 0).any():
            raise ValueError(f"group {group!r}: a copy between ids of which one has no page")
        self._epoch += 1
        self._ops.append(Copies(group, pages[: len(to)].astype(np.int32), pages[len(to) :].astype(np.int32)))
        if self._journal is not None:
            self._journal.copy(group, origin, to)

    def rebind(self, group: str, source: VirtualLike, target: VirtualLike) -> None:
        """Hand pages from ids to other ids of a group that does not cover its space; no byte moves.

        For two ids that name the same tokens: what one has computed, the other (a cached page, say) now holds.
        Sources must be bound and not pinned, targets live and not bound.
        """
        bindings = self.bindings[group]
        if bindings.covers:
            raise ValueError(f"group {group!r} binds every live id: a page of it cannot change its id")
        origin, to = bindings.space.require_live(source), bindings.space.require_live(target)
        pages = bindings.pages(origin)
        if len(origin) != len(to) or (pages == 0).any() or bindings.pages(to).any():
            raise ValueError(f"group {group!r}: a rebind needs as many bound sources as targets without a page")
        bindings.require_movable(pages)
        self._epoch += 1
        self._ops += bindings.rebind(origin, to, pages)
        if self._journal is not None:
            self._journal.rebind(group, origin, to)

    def pin(self, group: str, ids: VirtualLike) -> PhysicalPages:
        """Hold the places of these ids: no move touches them until `unpin`. Returns the places."""
        bindings = self.bindings[group]
        index = bindings.space.require_live(ids)
        pages = bindings.require_bound(index)
        self._epoch += 1
        bindings.pin(pages)
        if self._journal is not None:
            self._journal.pin(group, index)
        return pages.astype(np.int32).view(PhysicalPages)

    def unpin(self, group: str, pages: PhysicalPages) -> None:
        """Let go of places that `pin` returned. ValueError for a page that is not pinned."""
        index = as_physical(pages)
        self.bindings[group].unpin(index)
        self._epoch += 1
        if self._journal is not None:
            self._journal.unpin(group, index)

    def compact(self) -> None:
        """Close every hole that pins allow, now. Never needed (plans move what they must); for idle time and tests."""
        self._epoch += 1
        start = len(self._ops)
        for chain in self.chains:
            self._move(chain, [region.packed() for region in chain.regions])
            for region in chain.regions:
                region.trim()
        if self._journal is not None:
            self._journal.compact(self._ops[start:])

    def take_delta(self) -> Delta:
        """Everything the device must do since the last call, in order. To a journal this is the end of a step."""
        if self._journal is not None:
            self._journal.step()
        ops, self._ops = self._ops, []
        return Delta(ops)

    def check(self) -> None:
        """Assert every equation. Cost: the whole bookkeeping; for tests, audits and replay."""
        for ids in self.spaces.values():
            ids.check()
        for chain in self.chains:
            chain.check()
        for bindings in self.bindings.values():
            bindings.check()
        self.usage().check()

    # -- inside ---------------------------------------------------------------------------------------------

    def _capacity(self, names: Sequence[str]) -> int:
        return min(self.regions[name].last - self.regions[name].first for name in names)

    def _vector(self, pages: Mapping[str, int], what: str) -> dict[str, int]:
        for name, n in pages.items():
            if name not in self.groups:
                raise ValueError(f"{what} names group {name!r}; this pool has {', '.join(self.groups)}")
            if n < 0:
                raise ValueError(f"{what} of {n} pages of group {name!r}: must be 0 or more")
        return {name: int(pages.get(name, 0)) for name in self.groups}

    def _fresh(self, space: str, want: Mapping[str, int]) -> int:
        counts = {want[name] for name in self.covering[space]}
        if len(counts) > 1:
            raise ValueError(
                f"groups {', '.join(self.covering[space])} bind every id of {space!r}: equal demands are due"
            )
        return counts.pop()

    def _check_binds(self, plan: Plan, binds: Mapping[str, VirtualLike]) -> dict[str, NDArray[np.int64]]:
        chosen: dict[str, NDArray[np.int64]] = {}
        for name in binds:
            if name not in self.groups:
                raise ValueError(f"binds name group {name!r}; this pool has {', '.join(self.groups)}")
        minted = {space: np.asarray(ids).astype(np.int64) for space, ids in plan.ids.items()}
        for name, bindings in self.bindings.items():
            fresh, covers = minted[bindings.space.name], bindings.covers
            ids = fresh if covers and name not in binds else as_virtual(binds.get(name, ()))
            same = ids is fresh or (len(ids) == len(fresh) and not np.count_nonzero(ids != fresh))
            if covers and not same:
                raise ValueError(f"group {name!r} binds every live id: its binds are the plan's fresh ids, in order")
            if len(ids) != plan.demand[name]:
                raise ValueError(f"group {name!r}: {len(ids)} ids for a demand of {plan.demand[name]} pages")
            if len(ids) and not same:  # nobody has the plan's own ids
                bindings.require_bindable(ids, fresh)
            chosen[name] = ids
        return chosen

    def _move(self, chain: Chain, spans: Sequence[Span]) -> None:
        for i in chain.move_order(spans):
            region, (lo, hi) = chain.regions[i], spans[i]
            if lo <= region.lo and region.hi <= hi:
                continue
            moved = self.bindings[region.name].move(lo, hi)
            if moved is not None:
                self._ops += moved
                self.moved_pages[region.name] += len(moved[0].source)
