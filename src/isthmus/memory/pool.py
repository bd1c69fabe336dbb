"""The pool: regions, id spaces and page tables of one arena, planned exactly and changed at one door each.

    plan -> commit      pages for a demand, all or nothing; nothing changes before commit
    unbind, release     a window has passed / an id dies
    copy, pin, compact  states are copied, transfers hold addresses, holes are closed

Equations, asserted by `check` (with those of region.py, arena.py and ids.py):

    table[v] = p > 0  <=>  owner[p] = v                        per group
    a covering group binds every live id of its space; any other group's ids are a subset
    live + holes + gaps + null + tail = arena                  in bytes

Every call validates first and changes afterwards, so a call that raises leaves the pool as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.memory.arena import Chain, Span
from isthmus.memory.delta import Copies, Delta, Frees, Moves, Op, Writes
from isthmus.memory.group import Group, chain_order, covering_groups, null_bytes
from isthmus.memory.ids import IdSpace, PageTable, PhysicalPages, VirtualLike, VirtualPages, as_physical, as_virtual
from isthmus.memory.journal import Journal
from isthmus.memory.region import Anchor, Region
from isthmus.memory.usage import ArenaUsage, GroupUsage

_NONE: Mapping[str, int] = {}
_NO_BINDS: Mapping[str, VirtualLike] = {}


@dataclass(frozen=True)
class Plan:
    """How a demand will be met. True. Good for one commit, before any other change of the pool."""

    demand: Mapping[str, int]
    ids: Mapping[str, VirtualPages]  # per space: the fresh ids commit will mint, one per page of its covering groups
    spans: tuple[tuple[Span, ...], ...]  # per chain and region, where each will end up
    epoch: int  # the pool's count of changes when this was planned; -1: a what-if, not to be committed


@dataclass(frozen=True)
class Refusal:
    """Why a demand cannot be met, even with every hole closed. False."""

    demand: Mapping[str, int]
    short_bytes: int  # at least this much is missing; 0 when only page grids or pins are in the way
    message: str

    def __bool__(self) -> bool:
        return False


class StalePlanError(RuntimeError):
    """The pool changed after the plan was made: plan again."""


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
        self.chains = self._build_chains()
        self.regions = {r.name: r for chain in self.chains for r in chain.regions}
        self.covering = {space: covering_groups(self.groups, space) for space in sorted({g.space for g in groups})}
        self.spaces = {space: IdSpace(space, self._capacity(names)) for space, names in self.covering.items()}
        self.tables = {g.name: self.spaces[g.space].table(g.name) for g in self.groups.values()}
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
                return self._refuse(want, need)
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
        return all(_empty(chain).arrange([want[r.name] for r in chain.regions]) is not None for chain in self.chains)

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
        index = as_physical(pages)
        region = self.regions[group]
        if index.size and (index.min() < 0 or index.max() >= len(region.owner)):
            raise IndexError(f"group {group!r}: a physical page outside 0..{len(region.owner) - 1}")
        return region.owner[index].view(VirtualPages)

    def usage(self, cached: Mapping[str, int] = _NONE) -> ArenaUsage:
        """The arena in bytes; always sums. `cached`: how many of the owned pages per group nobody uses."""
        groups = {
            r.name: GroupUsage(
                r.name,
                r.page_bytes,
                r.live - cached.get(r.name, 0),
                len(r.holes),
                r.lo * r.page_bytes,
                r.hi * r.page_bytes,
                cached.get(r.name, 0),
            )
            for r in self.regions.values()
        }
        gap = sum(gap for chain in self.chains for gap in chain.gaps())
        high = self.chains[-1].regions[-1]
        top = self.chains[-1].hi
        if high.anchor is Anchor.HIGH and high.span:  # above its last whole page nobody can be
            gap, top = gap - (top - high.hi * high.page_bytes), high.hi * high.page_bytes
        return ArenaUsage(self.arena_bytes, self.null_bytes, gap, self.arena_bytes - top, groups)

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
                    pages = region.take(len(ids), *span)
                    region.occupy(pages, ids)
                    self._write(region.name, ids, pages)
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
        space = self.spaces[self.groups[group].space]
        if group in self.covering[space.name]:
            raise ValueError(f"group {group!r} binds every live id: release the ids instead")
        index = space.require_live(ids)
        pages = self._bound_pages(group, index)
        if (pages == 0).any():
            raise ValueError(f"group {group!r}: virtual page id {int(index[pages == 0][0])} is not bound")
        self._refuse_pinned(group, pages)
        self._epoch += 1
        self._give_back(group, index, pages)
        if self._journal is not None:
            self._journal.unbind(group, index)

    def release(self, space: str, ids: VirtualLike) -> None:
        """The ids die: every group of the space gives back their pages. A second release raises."""
        index = self.spaces[space].require_live(ids)
        held = {name: self._bound_pages(name, index) for name, g in self.groups.items() if g.space == space}
        for name, pages in held.items():
            self._refuse_pinned(name, pages)
        self._epoch += 1
        for name, pages in held.items():
            bound = pages != 0
            self._give_back(name, index[bound], pages[bound])
        self.spaces[space].retire(index)
        if self._journal is not None:
            self._journal.release(space, index)

    def copy(self, group: str, source: VirtualLike, destination: VirtualLike) -> None:
        """Copy whole pages between bound ids of a group: a state forks or is saved. No destination is a source."""
        space = self.spaces[self.groups[group].space]
        to = space.require_live(destination)
        origin = as_virtual(source)
        space.is_live(origin)
        if len(origin) != len(to) or np.isin(to, origin).any():
            raise ValueError(f"group {group!r}: a copy needs as many sources as destinations, and none that is both")
        pages = self._bound_pages(group, np.concatenate((origin, to)))
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
        space = self.spaces[self.groups[group].space]
        if group in self.covering[space.name]:
            raise ValueError(f"group {group!r} binds every live id: a page of it cannot change its id")
        origin, to = space.require_live(source), space.require_live(target)
        pages = self._bound_pages(group, origin)
        if len(origin) != len(to) or (pages == 0).any() or self._bound_pages(group, to).any():
            raise ValueError(f"group {group!r}: a rebind needs as many bound sources as targets without a page")
        self._refuse_pinned(group, pages)
        self._epoch += 1
        self.regions[group].owner[pages] = to
        self._write(group, origin, np.zeros(len(origin), np.int64))
        self._write(group, to, pages)
        if self._journal is not None:
            self._journal.rebind(group, origin, to)

    def pin(self, group: str, ids: VirtualLike) -> PhysicalPages:
        """Hold the places of these ids: no move touches them until `unpin`. Returns the places."""
        index = self.spaces[self.groups[group].space].require_live(ids)
        pages = self._bound_pages(group, index)
        if (pages == 0).any():
            raise ValueError(f"group {group!r}: virtual page id {int(index[pages == 0][0])} is not bound")
        self._epoch += 1
        pins = self.regions[group].pins
        for page in pages.tolist():
            pins[page] = pins.get(page, 0) + 1
        if self._journal is not None:
            self._journal.pin(group, index)
        return pages.astype(np.int32).view(PhysicalPages)

    def unpin(self, group: str, pages: PhysicalPages) -> None:
        """Let go of places that `pin` returned. ValueError for a page that is not pinned."""
        index = as_physical(pages)
        pins = self.regions[group].pins
        counts: dict[int, int] = {}
        for page in index.tolist():
            counts[page] = counts.get(page, 0) + 1
            if counts[page] > pins.get(page, 0):
                raise ValueError(f"group {group!r}: physical page {page} is not pinned")
        self._epoch += 1
        for page, n in counts.items():
            pins[page] -= n
            if not pins[page]:
                del pins[page]
        if self._journal is not None:
            self._journal.unpin(group, index)

    def compact(self) -> None:
        """Close every hole that pins allow, now. Never needed (plans move what they must); for idle time and tests."""
        self._epoch += 1
        start = len(self._ops)
        for chain in self.chains:
            self._move(chain, [_packed(region) for region in chain.regions])
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
        for name, region in self.regions.items():
            entries = self.tables[name].entries
            bound = np.flatnonzero(entries)
            assert len(bound) == region.live, f"group {name!r}: {len(bound)} ids bound, {region.live} pages live"
            assert np.array_equal(region.owner[entries[bound]], bound), f"group {name!r}: table and owners disagree"
        for space, names in self.covering.items():
            for name in names:
                live = self.spaces[space].live
                assert self.regions[name].live == live, f"group {name!r} does not bind every live id of {space!r}"
        self.usage().check()

    # -- inside ---------------------------------------------------------------------------------------------

    def _build_chains(self) -> list[Chain]:
        names = list(self.groups)
        if self.walls is None:
            return [self._chain(self.null_bytes, self.arena_bytes, names, len(names) > 1)]
        if set(self.walls) != set(names) or min(self.walls.values()) < 0:
            raise ValueError(f"walls must name a size for each of {', '.join(names)}")
        if self.null_bytes + sum(self.walls.values()) > self.arena_bytes:
            raise ValueError(
                f"walls of {sum(self.walls.values())} bytes and {self.null_bytes} for the null pages "
                f"do not fit an arena of {self.arena_bytes}"
            )
        chains, lo = [], self.null_bytes
        for name in names:
            chains.append(self._chain(lo, lo + self.walls[name], [name], ends=False))
            lo += self.walls[name]
        return chains

    def _chain(self, lo: int, hi: int, names: Sequence[str], ends: bool) -> Chain:
        anchors = [Anchor.FLOAT] * len(names)
        anchors[0] = Anchor.LOW
        if ends:
            anchors[-1] = Anchor.HIGH
        regions = []
        for name, anchor in zip(names, anchors, strict=True):
            size = self.groups[name].spec.page_bytes
            regions.append(Region(name, size, self.arena_bytes // size, -(-lo // size), hi // size, anchor))
        return Chain(lo, hi, regions)

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

    def _refuse(self, want: dict[str, int], need: dict[str, int]) -> Refusal:
        sizes = {name: self.groups[name].spec.page_bytes for name in self.groups}
        short = 0
        for chain in self.chains:
            wanted = sum(need[r.name] * sizes[r.name] for r in chain.regions)
            short += max(0, wanted - (chain.hi - chain.lo))
        asked = ", ".join(f"{n} {name}" for name, n in want.items() if n)
        live = ", ".join(f"{region.live} {name}" for name, region in self.regions.items())
        reason = f"{short:,} bytes are missing" if short else "page borders, walls or pins leave no room"
        message = (
            f"no room for {asked} pages in an arena of {self.arena_bytes:,} bytes with {live} pages live: {reason}"
        )
        return Refusal(want, short, message)

    def _check_binds(self, plan: Plan, binds: Mapping[str, VirtualLike]) -> dict[str, NDArray[np.int64]]:
        chosen: dict[str, NDArray[np.int64]] = {}
        for name in binds:
            if name not in self.groups:
                raise ValueError(f"binds name group {name!r}; this pool has {', '.join(self.groups)}")
        minted = {space: np.asarray(ids).astype(np.int64) for space, ids in plan.ids.items()}
        for name, group in self.groups.items():
            fresh = minted[group.space]
            covers = name in self.covering[group.space]
            ids = fresh if covers and name not in binds else as_virtual(binds.get(name, ()))
            same = ids is fresh or (len(ids) == len(fresh) and not np.count_nonzero(ids != fresh))
            if covers and not same:
                raise ValueError(f"group {name!r} binds every live id: its binds are the plan's fresh ids, in order")
            if len(ids) != plan.demand[name]:
                raise ValueError(f"group {name!r}: {len(ids)} ids for a demand of {plan.demand[name]} pages")
            if len(ids) and not same:  # nobody has the plan's own ids
                self._check_free_to_bind(name, ids, fresh)
            chosen[name] = ids
        return chosen

    def _check_free_to_bind(self, group: str, ids: NDArray[np.int64], fresh: NDArray[np.int64]) -> None:
        space = self.spaces[self.groups[group].space]
        alive = space.is_live(ids)
        if np.count_nonzero(alive) < len(ids):
            unknown = ids[~alive]
            strange = unknown[~np.isin(unknown, fresh)]
            if len(strange):
                raise ValueError(
                    f"group {group!r}: virtual page id {int(strange[0])} is neither live nor one of the plan's"
                )
        bound = self.tables[group].pages(ids) != 0
        if np.count_nonzero(bound):
            raise ValueError(f"group {group!r}: virtual page id {int(ids[bound][0])} has a page already")
        space.require_distinct(ids)

    def _bound_pages(self, group: str, index: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.tables[group].pages(index).astype(np.int64)

    def _refuse_pinned(self, group: str, pages: NDArray[np.int64]) -> None:
        pins = self.regions[group].pins
        if pins:
            held = [page for page in pages.tolist() if page in pins]
            if held:
                raise ValueError(f"group {group!r}: physical page {held[0]} is pinned by a transfer: unpin it first")

    def _give_back(self, group: str, index: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        if not len(index):
            return
        region = self.regions[group]
        region.vacate(pages)
        region.trim()
        self._write(group, index, np.zeros(len(index), np.int64))
        self._ops.append(Frees(group, pages.astype(np.int32)))

    def _move(self, chain: Chain, spans: Sequence[Span]) -> None:
        for i in chain.move_order(spans):
            region, (lo, hi) = chain.regions[i], spans[i]
            if lo <= region.lo and region.hi <= hi:
                continue
            source = region.outside(lo, hi)
            if not len(source):
                continue
            ids = region.owner[source].astype(np.int64)
            destination = region.take(len(source), lo, hi)
            region.occupy(destination, ids)
            region.vacate(source)
            self.moved_pages[region.name] += len(source)
            self._ops.append(Moves(region.name, source.astype(np.int32), destination.astype(np.int32)))
            self._write(region.name, ids, destination)

    def _write(self, group: str, ids: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        self.tables[group].bind(ids, pages)
        self._ops.append(Writes(group, ids.astype(np.int32), pages.astype(np.int32)))


def _empty(chain: Chain) -> Chain:
    """The same borders and grids with nothing live."""
    return Chain(
        chain.lo,
        chain.hi,
        [Region(r.name, r.page_bytes, 0, r.first, r.last, r.anchor) for r in chain.regions],
    )


def _packed(region: Region) -> Span:
    """The smallest span at the region's anchor (floats: where they start today) that holds what is live and pinned."""
    pinned = region.cover(keep=False)
    if region.anchor is Anchor.HIGH:
        return min(region.last - region.live, pinned[0]), region.last
    lo = region.lo
    return lo, max(lo + region.live, pinned[1])
