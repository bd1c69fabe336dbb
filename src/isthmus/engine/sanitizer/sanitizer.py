"""The executor around the executor: checks each step, keeps faulty sequences out of it, ends, fences, reports.

    launch(step)   audit and shadow take it in -> sequences at fault are cut out of it -> the rest is launched
    wait()         full: the device's tables and the results are looked at
    carry_out()    sequences at fault end, what is cached is dropped, pages are fenced, faults are told
    audit()        the books are balanced

The core calls the last two. A fault that is seen before the launch has harmed nobody: only the sequence it was found
in ends, and the page is fenced unless somebody else has it rightfully. A fault in what a delta or the device has done
ends everybody who uses the pages.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from isthmus.engine import capacity
from isthmus.engine.sanitizer import mirrors
from isthmus.engine.sanitizer.books import Books
from isthmus.engine.sanitizer.claims import Claims
from isthmus.engine.sanitizer.cut import Cut, joined
from isthmus.engine.sanitizer.finding import Finding, Place, report, stop_reason
from isthmus.engine.sanitizer.guard import GuardedPool
from isthmus.engine.sanitizer.shadow import Shadow
from isthmus.engine.sanitizer.stays import Stay, Stays
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.sequence import Status
from isthmus.engine.step import Executor, Landed, Launched, Result, Sampled, Step

_log = logging.getLogger(__name__)

_REPORTS = 32  # faults that are told in full; later ones are told in a line
_NOBODY: frozenset[int] = frozenset()
_ITS_OWN = ("freed", "table", "nan")  # the ids that a sequence at fault has are its own
_BY_ID = ("leak", "table")  # nothing points at the places: that nobody gets the ids again is enough


class Sanitizer:
    """Implements `Executor`.

    Args:
        executor: runs the steps; with `full` one that can be looked into (`mirrors.Open`).
        scheduler: of a `GuardedPool`.
        full: keep a shadow and look at the device; else the books alone are checked.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, *, full: bool) -> None:
        assert isinstance(scheduler.pool, GuardedPool), "memory that is checked needs a GuardedPool"
        self.inner = executor
        self.faults: Counter[str] = Counter()  # by kind, since the start
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._pool.complain = self._refused_at_the_door
        self._stays = Stays(scheduler.running, scheduler.config.max_num_seqs)
        self._books = Books(scheduler, self._pool, self._stays)
        page_size = capacity.page_size(self._pool.groups.values())
        self._shadow = Shadow(self._pool, self._stays, page_size) if full else None
        self._pins: dict[str, set[int]] = {}  # pages that were pinned at the last launch, per group
        self._held: Step | None = None  # nothing of it was left to run: its delta goes out before the next one's
        self._ending = False  # what is at fault gives back its pages now
        self._found: list[Finding] = []  # and not carried out
        self._wanted: set[tuple[str, int]] = set()  # pages to be fenced once nobody has them
        self._fenced = 0  # pages, when the longest sequence was worked out
        self._told: set[str] = set()  # faults of nobody, which come again at every audit

    @property
    def overlaps(self) -> bool:
        """As the executor's."""
        return self.inner.overlaps

    @property
    def fenced_pages(self) -> dict[str, int]:
        """Pages per group that nobody gets any more."""
        return self._pool.fenced_pages

    def launch(self, step: Step) -> Launched:
        """Check a step, and launch what is left of it."""
        self._stays.update()
        delta, writes, found = self._books.in_range(step.delta, step.block_writes)
        step = dataclasses.replace(step, delta=delta, block_writes=writes)
        found += self._books.touched(delta)
        self._books.note(step)
        claims = self._claims(step, found)
        at_fault = self._note(found)
        numbers = self._stays.number[step.rows]
        gone = np.isin(numbers, list(at_fault))
        if claims is not None:
            claims.carry_out(gone)
        cut = Cut.of(step, gone) if gone.any() else None
        left = step if cut is None else cut.step
        if self._held is not None:
            left, self._held = joined(self._held, left), None
        if cut is not None and not len(left.rows):
            self._held = left
            return Landed(cut.results([]))
        return _Checked(self, self.inner.launch(left), step, cut, numbers)

    def audit(self) -> None:
        """After a settle, or an abort: does everything add up?"""
        self._seize()
        found = []
        for finding in self._books.balance():
            if finding.stays or finding.kind == "leak":
                found.append(finding)
            elif finding.what not in self._told:
                self._told.add(finding.what)
                found.append(finding)
        self._note(found)

    def carry_out(self) -> list[tuple[Seq, str]]:
        """End what is at fault, fence and tell. Returns the sequences that ended now, and what clients are told."""
        if not self._found:
            return self._shorten()
        found, self._found = self._found, []
        reasons: dict[int, str] = {}
        for finding in found:
            for number in finding.stays:
                reasons.setdefault(number, stop_reason(finding))
        served = self._stays.served
        stays = {number: served[number] for number in reasons if number in served}
        with_pages = [finding for finding in found if finding.places and finding.kind != "door"]
        self._shield(stays)
        self._disown(found, stays)
        for finding in with_pages:
            self._fence(finding)
        self._end(stays, reasons, drop=any(finding.kind not in ("leak", "door") for finding in found))
        self._seize()
        for finding in found:
            self._tell(finding, stays)
        return [(stay.sequence, reasons[number]) for number, stay in stays.items()] + self._shorten()

    # -- looking ----------------------------------------------------------------------------------------------

    def _claims(self, step: Step, found: list[Finding]) -> Claims | None:
        """The shadow takes in a step; what is wrong with it is added to `found`."""
        shadow = self._shadow
        if shadow is None:
            return None
        pins = {name: set(region.pins) for name, region in self._pool.regions.items()}
        kept = {name: pages & self._pins.get(name, set()) for name, pages in pins.items()}
        self._pins = pins
        found += shadow.apply(step.delta, kept, self._scheduler.counters.steps)
        columns = np.zeros(len(self._stays.number), np.int64)
        columns[step.rows] = -(-(step.past + np.diff(step.query_start)) // shadow.page_size)
        shadow.write_blocks(step.block_writes, columns)
        shadow.write_states(step.rows, step.states)
        claims = Claims(shadow, step)
        found += claims.check()
        return claims

    def _landed(
        self, step: Step, cut: Cut | None, numbers: NDArray[np.int64], results: Sequence[Result]
    ) -> Sequence[Result]:
        """A step is over: look at the device and at its results."""
        if cut is not None:
            results = cut.results(results)
        if self._shadow is None:
            return results
        device, found = cast(mirrors.Open, self.inner), list[Finding]()
        if self._held is None:
            found += mirrors.compare(self._shadow, device.tables())
        for i, result in enumerate(results[: len(step.samples)]):
            if not isinstance(result, Sampled) or result.problem is None:
                continue
            s = int(np.searchsorted(step.query_start, step.samples[i].index, side="right")) - 1
            stay = self._stays.served.get(int(numbers[s]))
            if stay is not None:
                found.append(mirrors.spoiled(self._shadow, stay, int(step.past[s]), device.arena))
        self._note(found)
        return results

    def _note(self, found: Sequence[Finding]) -> frozenset[int]:
        """Keep findings until they are carried out, the first of each sequence. Returns who is at fault, or harmed."""
        at_fault = _NOBODY
        for finding in found:
            whole = self._with_the_harmed(finding)
            if not whole.stays or whole.stays - at_fault:
                self._found.append(whole)
            at_fault |= whole.stays
        return at_fault

    def _with_the_harmed(self, finding: Finding) -> Finding:
        if not finding.harmed:
            return finding
        stays = finding.stays
        for place in finding.places:
            space = self._pool.groups[place.group].space
            stays |= self._books.users(space, [place.virtual])
            if self._shadow is not None:
                stays |= self._shadow.users(space, [place.virtual])
        return dataclasses.replace(finding, stays=stays)

    def _refused_at_the_door(self, space: str, virtual: int, why: str) -> None:
        if self._ending:  # what is wrong with these ids has been told
            return
        had = self._books.had[space]
        who = self._stays.label(int(had[virtual])) if 0 < virtual < len(had) else "nobody"
        what = f"id {virtual} of {space} is refused: {why}; {who} had it last; nothing was changed"
        place = Place(self._pool.covering[space][0], self._was(space, virtual), max(virtual, 0))
        self._found.append(Finding("door", what, (place,)))

    def _was(self, space: str, virtual: int) -> int:
        """The last page of an id in the group that covers its space; 0 if that is not known."""
        if self._shadow is None or not 0 < virtual <= self._pool.ids(space).capacity:
            return 0
        return int(self._shadow.pages[self._pool.covering[space][0]].was[virtual])

    # -- acting -----------------------------------------------------------------------------------------------

    def _shield(self, ended: dict[int, Stay]) -> None:
        """Nobody gives back what others than these have."""
        for space, shielded in self._pool.shielded.items():
            shielded[:] = False
            for number, stay in self._stays.served.items():
                if number not in ended:
                    ids = self._books.row(space, stay.row)
                    shielded[ids[ids < len(shielded)]] = True

    def _disown(self, found: Sequence[Finding], ended: dict[int, Stay]) -> None:
        """What a sequence at fault has of others in its row is not for it to give back."""
        blocks = self._scheduler.placement.blocks
        for finding in found:
            for number in finding.stays & ended.keys() if finding.kind not in _ITS_OWN else ():
                row = ended[number].row
                columns = np.arange(blocks.columns[row])
                ids = blocks.ids(np.full(len(columns), row), columns)
                bad = np.isin(ids, [place.virtual for place in finding.places])
                had = self._books.had.get("tokens", columns)
                bad[bad] = had[ids[bad] * (ids[bad] < len(had))] != number
                blocks.clear(np.full(int(bad.sum()), row), columns[bad])

    def _fence(self, finding: Finding) -> None:
        """Ids of a fault, and of whoever has its pages, are nobody's any more, unless others have them."""
        for place in finding.places:
            space = self._pool.groups[place.group].space
            owner = int(self._pool.regions[place.group].owner[place.page]) if place.page else 0
            for virtual in {place.virtual, owner} - {0}:
                if self._is_live(space, virtual) and not self._pool.shielded[space][virtual]:
                    self._pool.fence(space, [virtual])
            if place.page and finding.kind not in _BY_ID:
                self._wanted.add((place.group, place.page))

    def _is_live(self, space: str, virtual: int) -> bool:
        known = self._pool.ids(space)
        return 0 < virtual <= known.capacity and bool(known.is_live([virtual])[0])

    def _end(self, stays: dict[int, Stay], reasons: dict[int, str], *, drop: bool) -> None:
        self._ending = True
        try:
            for number, stay in stays.items():
                stay.sequence.names = None  # what it computed is not for others
                self._scheduler.finish([stay.sequence], "abort", reasons[number])
            if drop:
                self._scheduler.distrust_prefix_cache()
                if self._scheduler.cache is not None:
                    self._scheduler.cache.bury()
        finally:
            self._ending = False
            for shielded in self._pool.shielded.values():
                shielded[:] = False

    def _seize(self) -> None:
        """Fence pages of faults that nobody has, or has any more."""
        for group, page in sorted(self._wanted):
            owner = int(self._pool.regions[group].owner[page])
            if self._pool.fenced[self._pool.groups[group].space][owner]:
                self._pool.hold(group, page)
                self._wanted.discard((group, page))
            elif not owner and self._pool.seize(group, page):
                self._wanted.discard((group, page))

    def _fate(self, finding: Finding) -> str:
        """What became of a fault's page."""
        if not finding.places or finding.kind == "door":
            return "nothing is fenced"
        place = finding.places[0]
        space = self._pool.groups[place.group].space
        if not place.page:
            fenced = place.virtual > 0 and bool(self._pool.fenced[space][place.virtual])
            return f"id {place.virtual} is fenced" if fenced else "nothing is fenced"
        owner = int(self._pool.regions[place.group].owner[place.page])
        if owner and self._pool.fenced[space][owner]:
            return f"page {place.page} is fenced" + (f" with id {owner}" if finding.kind in _BY_ID else "")
        if owner:
            users = sorted(self._stays.label(number) for number in self._books.users(space, [owner]))
            rightful = ", ".join(users) or "the prefix cache"
            return f"page {place.page} is left to {rightful}, whose it is now, and fenced as soon as it is free"
        return f"page {place.page} has bytes of another group now, and is fenced as soon as it can be had"

    def _tell(self, finding: Finding, ended: dict[int, Stay]) -> None:
        self.faults[finding.kind] += 1
        who = sorted(self._stays.label(number) for number in finding.stays)
        mine = sorted(self._stays.label(number) for number in finding.stays & ended.keys())
        place = finding.places[0] if finding.places else None
        if not who and place is not None:
            who = self._last(place)
        if self.faults.total() > _REPORTS:
            _log.error("memory fault (%s): %s; ended: %s", finding.kind, finding.what, ", ".join(mine) or "nobody")
            return
        group = None if place is None else self._pool.groups[place.group]
        history = [] if place is None or self._shadow is None else self._shadow.history(place)
        _log.error("%s", report(finding, group, who, mine, self._fate(finding), history))

    def _last(self, place: Place) -> list[str]:
        """Who had a page last."""
        had = self._books.had[self._pool.groups[place.group].space]
        number = int(had[place.virtual]) if 0 <= place.virtual < len(had) else 0
        if self._shadow is not None and not number:
            number = self._shadow.last_holder(place)
        return [f"{self._stays.label(number)}, which had it last"] if number else []

    def _shorten(self) -> list[tuple[Seq, str]]:
        """Fenced pages leave less room: what does not fit any more must not wait for it."""
        scheduler, pool = self._scheduler, self._pool
        fenced = pool.fenced_pages
        if sum(fenced.values()) == self._fenced:
            return []
        self._fenced = sum(fenced.values())
        release = {name: region.live - fenced[name] for name, region in pool.regions.items()}

        def too_long(length: int) -> bool:
            peaks = capacity.peaks(pool.groups.values(), length)
            return not all(pool.plan(peak, release) for peak in peaks)

        scheduler.longest = bisect.bisect_left(range(1, scheduler.longest + 1), True, key=too_long)
        reason = f"pages are fenced after a memory fault: sequences of up to {scheduler.longest + 1:,} tokens fit now"
        waiting = [s for request in scheduler.requests.values() for s in request.sequences]
        doomed = [s for s in waiting if s.status is not Status.FINISHED and s.most_cached > scheduler.longest]
        scheduler.finish(doomed, "abort", reason)
        return [(sequence, reason) for sequence in doomed]


class _Checked:
    """Implements `Launched`."""

    def __init__(
        self, owner: Sanitizer, inner: Launched, step: Step, cut: Cut | None, numbers: NDArray[np.int64]
    ) -> None:
        self._owner = owner
        self._inner = inner
        self._about = step, cut, numbers

    def wait(self) -> Sequence[Result]:
        return self._owner._landed(*self._about, self._inner.wait())
