"""One fuzzed run: a scheduler, its pool and prefix cache, a shadow device, and the checks after every operation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request, Status
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.step import Result, Sampled, Step
from isthmus.memory import Copies, Delta, Frees, Moves, Plan, Pool, Refusal
from isthmus.params import RequestError
from isthmus.sim import fuzz_checks, fuzz_events
from isthmus.sim.fuzz_events import Event
from isthmus.sim.fuzz_model import Truth, truth_of
from isthmus.sim.fuzz_shadow import Shadow
from isthmus.sim.fuzz_world import World

_NONE: Mapping[str, int] = {}


class StingyPool(Pool):
    """A pool that can refuse what is optional: a snapshot, the only demand that names states alone where there are
    tokens too. (In a model of states alone, only a full arena refuses one.)"""

    stingy = 0  # snapshots that will be refused

    def plan(self, demand: Mapping[str, int], release: Mapping[str, int] = _NONE) -> Plan | Refusal:
        """As `Pool.plan`."""
        if (
            self.stingy
            and not release
            and "tokens" in self.covering
            and set(demand) == set(self.covering.get("states", ()))
        ):
            self.stingy -= 1
            return Refusal(demand, 0, "no room for a snapshot, by order")
        return super().plan(demand, release)


@dataclass(frozen=True)
class _Flight:
    step: Step
    results: list[Result]
    turn: int  # when it was planned
    trouble: dict[Seq, int]  # who read of a spoiled step, and of which


class TurnsSpentError(Exception):
    """The run was to be over by now, whatever comes of it."""


class Life:
    """Does one event after the other. Whatever is wrong raises, most of it as AssertionError.

    Args:
        most_turns: TurnsSpentError when so many steps were planned; None: no limit.
    """

    def __init__(self, world: World, most_turns: int | None = None) -> None:
        self.world = world
        self.turns = 0  # the clock
        self._most_turns = most_turns
        self.pool = StingyPool(world.arena_bytes, world.groups, walls=world.walls)
        self.scheduler = Scheduler(
            self.pool,
            world.config,
            max_model_len=world.max_model_len,
            eos_token_ids=world.eos,
            max_cached_tokens=world.max_cached_tokens,
            prefix_caching=world.prefix_caching,
            clock=lambda: float(self.turns),
        )
        self.shadow = Shadow(self.pool, world.max_num_seqs, world.max_model_len)
        self.requests: dict[str, Request] = {}  # every one that was queued
        self.seen: Counter[str] = Counter()  # what the run went through, to know what fuzzing reaches
        self.digest = blake2b(digest_size=16)  # of every step that was planned
        self._flights: deque[_Flight] = deque()
        self._truths: dict[Seq, Truth] = {}
        self._cut: set[Seq] = set()  # ended from outside, or by a problem
        self._to_spoil: set[Seq] = set()
        self._troubles = 0  # steps that were spoiled
        self._known: dict[int, int] = {}  # trouble -> the newest step that was out when its first problem was told
        self._began: dict[int, int] = {}  # stay in a row -> its first step
        self._scored: dict[str, set[int]] = {}  # prompt positions whose log probabilities were asked for
        self._page_bytes = {group.name: group.spec.page_bytes for group in world.groups}

    @property
    def has_work(self) -> bool:
        """Is anything left to do?"""
        return self.scheduler.has_work or bool(self._flights)

    @property
    def flights(self) -> int:
        """Steps that are out."""
        return len(self._flights)

    def do(self, event: Event) -> None:
        """One event, and every check after it."""
        match event:
            case fuzz_events.Add():
                self._add(event)
            case fuzz_events.Turn(times):
                for _ in range(times):
                    self._turn()
            case fuzz_events.Plan():
                self._plan()
            case fuzz_events.Land():
                self._land()
            case fuzz_events.Abort(name):
                self._abort(name)
            case fuzz_events.Stop(name, index):
                self._stop(self._live(name, index))
            case fuzz_events.Preempt(name, index):
                self._preempt(self._live(name, index))
            case fuzz_events.Spoil(name, index):
                self._to_spoil.update(self._live(name, index))
            case fuzz_events.Reset():
                self.scheduler.reset_prefix_cache()
            case fuzz_events.Compact(pinned):
                self._compact(pinned)
            case fuzz_events.Refuse(times):
                self.pool.stingy = times
        fuzz_checks.check_state(self.scheduler)

    def finish(self) -> None:
        """Go on until nothing is left to do, which must come about in time; then every byte must be free."""
        live = [s for request in self.scheduler.requests.values() for s in request.sequences]
        # The oldest goes on by a token at least in every step, or waits for the flight before it.
        most = 10 + 2 * sum(len(s.prompt) + s.limit + 3 for s in live)
        for _ in range(most):
            if not self.has_work:
                break
            self._turn()
            fuzz_checks.check_state(self.scheduler)
        assert not self.has_work, f"{len(self.scheduler.requests)} requests do not end in {most} steps"
        self._check_end()

    # -- events ---------------------------------------------------------------------------------------------

    def _add(self, event: fuzz_events.Add) -> None:
        if event.name in self.requests:
            return
        request, before = event.request(self.world.vocab), len(self.scheduler.waiting)
        prompt, most = len(request.prompt_token_ids), self.world.max_model_len
        output = min(most - prompt, event.max_tokens or 1)
        possible = 0 < prompt < most and prompt + output - 1 <= self.scheduler.longest
        try:
            self.scheduler.add(request)
        except RequestError:
            assert not possible, f"{event.name} was refused, and {self.scheduler.longest} tokens fit"
            assert len(self.scheduler.waiting) == before, "a request that was refused is waiting"
            self.seen["requests refused"] += 1
            return
        assert possible, f"{event.name} was queued, and only {self.scheduler.longest} tokens fit"
        self.requests[event.name] = request
        self._truths |= {s: truth_of(s, self.world.vocab, self.world.eos) for s in request.sequences}

    def _turn(self) -> None:
        launched = self._plan()
        if self._flights and not (launched and self.world.overlap and len(self._flights) == 1):
            self._land()

    def _plan(self) -> bool:
        """Schedule and launch, if a step may be planned now. Was one launched?"""
        scheduler = self.scheduler
        if not scheduler.has_work or len(self._flights) > int(self.world.overlap):
            return False
        if self.turns == self._most_turns:
            raise TurnsSpentError
        self.turns += 1
        oldest = fuzz_checks.oldest_that_can_run(scheduler)
        step = scheduler.schedule()
        if step is None:
            assert self._flights, "nothing to do, and nothing to wait for"
            return False
        fuzz_checks.check_step(scheduler, self.world, step, oldest=oldest)
        by_row = {s.row: s for s in scheduler.running}
        sequences = [by_row[row] for row in step.rows.tolist()]
        self._note(step)
        self._score(step, sequences)
        results = self.shadow.run(step, [self._truths[s] for s in sequences], self._spoil(sequences))
        self.shadow.check(self.pool)
        trouble = self._trouble(sequences, self.shadow.taints.tolist())
        self._flights.append(_Flight(step, results, self.turns, trouble))
        return True

    def _land(self) -> None:
        if not self._flights:
            return
        flight = self._flights.popleft()
        events = self.scheduler.settle(flight.step, flight.results)
        for sequence, result in events:
            truth, done = self._truths[sequence], len(sequence.prompt) + len(sequence.output)
            if isinstance(result, Sampled):
                assert sequence.finish_reason == "abort", f"{truth.name} goes on after a problem"
                self._cut.add(sequence)
                self._known.setdefault(flight.trouble[sequence], self.turns)
                self.seen["problems"] += 1
                continue
            assert sequence.output[-1] == truth.tokens[done - 1], f"{truth.name} has another token {done - 1}"
            ended = done == len(truth.tokens)
            assert (sequence.status is Status.FINISHED) == ended, f"{truth.name} at {done} tokens: ended or not"
            self._check_scores(sequence)

    def _abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None:
            return
        live = [s for s in request.sequences if s.status is not Status.FINISHED]
        for s in live:
            prefill = s.status is Status.RUNNING and s.past < len(s.prompt)
            self.seen[f"aborted {'in prefill' if prefill else s.status.value}"] += 1
            self.seen["aborted with a token in flight"] += s.has_pending
        assert self.scheduler.abort(name) == bool(live), f"{name}: whether it was there to abort"
        self._cut.update(live)

    def _stop(self, sequences: list[Seq]) -> None:
        self.scheduler.finish(sequences, "stop", "a text")
        self._cut.update(sequences)
        self.seen["stopped"] += len(sequences)

    def _preempt(self, sequences: list[Seq]) -> None:
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self.scheduler.preempt(sequence)
                self.seen["preempted by order"] += 1

    def _compact(self, every: int) -> None:
        pinned = {}
        for name, group in self.pool.groups.items() if every else ():
            ids = np.asarray(self.pool.ids(group.space).live_ids())
            ids = ids[self.pool.is_bound(name, ids)][::every]
            pinned[name] = ids, self.pool.pin(name, ids)
        self.pool.compact()
        self.pool.check()
        for name, (ids, pages) in pinned.items():
            assert np.array_equal(self.pool.table(name).translate(ids), pages), f"{name}: a pinned page moved"
            self.pool.unpin(name, pages)
            self.seen["pages pinned"] += len(pages)
        holes = 0 if every else sum(len(region.holes) for region in self.pool.regions.values())
        assert not holes, f"{holes} holes are left, and nothing is pinned"

    # -- inside ---------------------------------------------------------------------------------------------

    def _live(self, name: str, index: int) -> list[Seq]:
        """The sequence, if there is one and it has not ended."""
        found = self.requests[name].sequences[index : index + 1] if name in self.requests else []
        return [s for s in found if s.status is not Status.FINISHED]

    def _spoil(self, sequences: list[Seq]) -> dict[int, int]:
        """For whom this step goes wrong."""
        found = [i for i, s in enumerate(sequences) if s in self._to_spoil]
        self._to_spoil.difference_update(sequences)
        numbers = range(self._troubles + 1, self._troubles + 1 + len(found))
        self._troubles += len(found)
        return dict(zip(found, numbers, strict=True))

    def _trouble(self, sequences: list[Seq], taints: list[int]) -> dict[Seq, int]:
        """Who in this step is in trouble. Nobody whose first step was planned after the problem was told may be."""
        for sequence in sequences:
            self._began.setdefault(int(self.scheduler.running.at.owner[sequence.row]), self.turns)
        trouble = {s: number for s, number in zip(sequences, taints, strict=True) if number}
        for s, number in trouble.items():
            began = self._began[int(self.scheduler.running.at.owner[s.row])]
            late = began > self._known.get(number, self.turns)
            assert not late, (
                f"{self._truths[s].name} reads what came of a step whose problem was told before it started"
            )
        return trouble

    def _note(self, step: Step) -> None:
        for array in (step.tokens, step.query_start, step.past, step.rows, step.states, *_arrays(step.delta)):
            self.digest.update(np.ascontiguousarray(array, np.int32).tobytes())

    def _score(self, step: Step, sequences: Sequence[Seq]) -> None:
        """Note which prompt positions a step scores, of whom."""
        for span in step.scores:
            request = self.requests[span.request_id]
            s = int(np.searchsorted(step.query_start, span.start, side="right")) - 1
            assert sequences[s] is request.sequences[0], f"{span.request_id}: the scores of another sequence"
            assert step.past[s] + span.start - step.query_start[s] == span.position - 1, "scores of another position"
            want = request.prompt_token_ids[span.position : span.position + len(span.targets)]
            assert span.targets.tolist() == want, f"{span.request_id}: other targets than the prompt's tokens"
            positions = self._scored.setdefault(span.request_id, set())
            positions.update(range(span.position, span.position + len(want)))

    def _check_scores(self, sequence: Seq) -> None:
        request = sequence.request
        if request.params.prompt_logprobs is not None and sequence.index == 0:
            scored = self._scored.get(request.request_id, set())
            assert scored == set(range(1, len(sequence.prompt))), f"{request.request_id}: prompt tokens without a score"

    def _check_end(self) -> None:
        scheduler, receipts = self.scheduler, [request.receipt for request in self.requests.values()]
        for sequence, truth in self._truths.items():
            want = truth.tokens[len(sequence.prompt) :]
            assert sequence.status is Status.FINISHED, f"{truth.name} has not ended"
            if sequence not in self._cut:
                assert np.array_equal(sequence.output, want), f"{truth.name} has {sequence.output}, not {want}"
                found = sequence.finish_reason, sequence.stop_reason
                assert found == (truth.reason, truth.stop_reason), f"{truth.name} ended for another reason: {found}"
        for request in self.requests.values():
            fuzz_checks.check_receipt(request, self._page_bytes, self.turns)
        counters = scheduler.counters
        assert sum(r.preemptions for r in receipts) == counters.preemptions, "preemptions are not the receipts'"
        assert counters.finished == len(self._truths), "the sequences that ended are miscounted"
        self._count()
        scheduler.reset_prefix_cache()
        fuzz_checks.check_state(scheduler)
        for name, region in self.pool.regions.items():
            assert region.live == 0, f"{name}: {region.live} pages are live after all have ended"
        for name in self.pool.covering.get("tokens", ())[:1]:
            taken, minted = sum(r.pages.get(name, 0) for r in receipts), self.pool.ids("tokens").minted
            assert taken == minted, f"{name}: the receipts have {taken} pages, {minted} were minted"

    def _count(self) -> None:
        counters, cache = self.scheduler.counters, self.scheduler.cache
        self.seen += self.shadow.seen
        self.seen += Counter(
            {
                "steps": counters.steps,
                "requests": len(self.requests),
                "sequences": len(self._truths),
                "tokens computed": counters.computed_tokens,
                "preemptions": counters.preemptions - self.seen["preempted by order"],
                "plans refused": counters.refusals,
                "prompt tokens cached": sum(r.receipt.cached_tokens for r in self.requests.values()),
                "hits cut by a kind": sum(r.receipt.cut_by is not None for r in self.requests.values()),
                "pages evicted": sum(cache.evicted.values()) if cache is not None else 0,
            }
        )


def _arrays(delta: Delta) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for op in delta.ops:
        if isinstance(op, Moves | Copies):
            found += [op.source, op.destination]
        elif isinstance(op, Frees):
            found.append(op.page)
        else:
            found += [op.virtual, op.physical]
    return found
