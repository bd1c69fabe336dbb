"""Which sequences run in the next step, with how many tokens, on which pages.

    schedule: share what the last step computes -> unbind what windows have passed -> tokens for those that run ->
              admit -> one plan -> one commit -> Step
    settle:   append what was sampled, end what is complete

Order is age: a smaller `Sequence.order` goes first everywhere. `running` and `waiting` are sorted by it, and every
running sequence is scheduled before any waiting one (admission.py).

Memory has one predicate, `Pool.plan` for the step's whole demand, priced by one function, `Placement.demand`. When
it refuses, cheapest first (compaction is inside plan): do not admit; shrink prefill chunks, the youngest first, which
may also wait with what it holds; preempt the youngest. The oldest always gets at least one token, so it finishes,
so everyone does: `add` has refused what an empty pool could not take to its end.

A step is in flight from `schedule` to `settle`. The executor runs steps and their deltas in the order they were
planned, so what is in flight counts as done, but for the tokens it chooses:

    known = prompt + output <= length = known + pending <= prompt + limit       pending: one per flight that samples
    0 <= past <= length;  past = length - 1 once it decodes                     both move on in `schedule`
    at most one flight when a step is planned                                   so then pending <= 1, past <= known
    two between its plan and the `settle` of the one before; none, when it is planned, if steps do not overlap

- A pending token goes through the model as -1: its row sampled it in the step before. The sequence sits out while its
  token is pending if that is its last (by length), or if its next choice depends on it (`looks_back`).
- Any other end is found when a flight settles and the next is out. What that one does for the sequence is dropped,
  its pages and its row are free at once: whoever gets them is planned later, so runs later.
- What a flight sampled goes to the sequence it was for, unless that has ended; rows may have changed hands. A
  preempted one takes its pending token in and does not start before it has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.cache.prefix import PrefixCache
from isthmus.engine import capacity
from isthmus.engine.admission import Admission, Waiting
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.flight import Event, Flight
from isthmus.engine.placement import Growth, Placement
from isthmus.engine.room import Room
from isthmus.engine.rows import Int64
from isthmus.engine.running import Running
from isthmus.engine.samples import is_plain, looks_back
from isthmus.engine.sequence import FinishReason, Request, Status, sequence_seed
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.sharing import Sharing
from isthmus.engine.step import Result, Results, Step
from isthmus.memory import Plan, Pool
from isthmus.params import RequestError

TOGETHER = 4  # steps


@dataclass
class Counters:
    """What happened since the start."""

    steps: int = 0
    prompt_tokens: int = 0  # of all requests that were queued, each prompt once whatever its n
    generation_tokens: int = 0
    computed_tokens: int = 0  # through the model, recomputation after preemption included
    preemptions: int = 0
    refusals: int = 0  # plans the pool refused to steps
    finished: int = 0  # sequences that ended, aborted ones included


class Scheduler:
    """Continuous batching over one pool. Torch-free; nothing but this object changes the pool.

    Args:
        pool: the arena's bookkeeping, all of it this scheduler's.
        config: how many sequences, how many tokens a step.
        max_model_len: prompt and output of a sequence never exceed it.
        eos_token_ids: ids that end a sequence unless its request says `ignore_eos`.
        max_cached_tokens: cap on what all sequences cache together, in whole pages; None: what the pool holds.
        prefix_caching: keep full pages of sequences that ended, for others that start with the same tokens.
        page_size: tokens between two boundaries that cached prefixes can end at; None: the token groups' page. Another
            one only in a model of states alone, which has no such groups.
        together: so many steps' pages are had and shared at once while all decode; 1: each when it is needed, and given
            back as soon as it is not. Fewer where a window passes a page in less.
        clock: seconds, for receipts alone.
    """

    def __init__(
        self,
        pool: Pool,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        max_cached_tokens: int | None = None,
        prefix_caching: bool = False,
        page_size: int | None = None,
        together: int = TOGETHER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.config = config
        self.max_model_len = max_model_len
        self.counters = Counters()
        self.running = Running(config.max_num_seqs)
        self.waiting = Waiting()
        self.requests: dict[str, Request] = {}  # those with a sequence that has not ended
        self._eos = frozenset(eos_token_ids)
        self._page_size = page_size or capacity.page_size(pool.groups.values())
        self._page_bytes = {name: group.spec.page_bytes for name, group in pool.groups.items()}
        self.cache = PrefixCache(pool, self._page_size) if prefix_caching else None
        self.placement = Placement(pool, config.max_num_seqs, self.cache)
        self._sharing = Sharing(self.cache, self.placement)
        windows = (max(1, group.window - 1) for group in pool.groups.values() if group.window is not None)
        self._together = min([together, *windows])
        self._locked_for = self._page_size if self._together > 1 else 1  # steps
        self._room = Room(pool, self.placement, self.cache, self._page_size, max_cached_tokens)
        self.clock = clock
        self._arrivals = 0
        self._flights: deque[Flight] = deque()  # oldest first
        self._unshared: Flight | None = None  # the newest step, until what it computes is shared
        self._most_tokens = max_cached_tokens
        # Tokens of one sequence alone that can be cached.
        self.longest = capacity.longest(pool, max_model_len, max_cached_tokens)

    # -- requests -------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Is there any sequence that has not ended?"""
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError, and nothing changed, if it can never be served."""
        prompt, params = request.prompt_token_ids, request.params
        if request.request_id in self.requests:
            raise RequestError(f"request {request.request_id!r} is being served already: give each its own id")
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token")
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt):,} tokens and max_model_len is {self.max_model_len:,}, of which one is "
                "for the output: shorten the prompt or raise --max-model-len"
            )
        limit = min(room, params.max_tokens or max(1, self.longest + 1 - len(prompt)))
        if len(prompt) + limit - 1 > self.longest:
            raise RequestError(self._impossible(len(prompt), limit))
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        back, plain = looks_back(params), is_plain(params)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        for i in range(params.n):
            seed = sequence_seed(params.seed, i)
            sequence = Seq(request, i, (arrival, i), seed, limit, prompt, back, plain, ends, queued=self.clock())
            request.sequences.append(sequence)
            self.waiting.add(sequence)
        request.packed = np.array(prompt, np.int32)
        self.requests[request.request_id] = request
        request.receipt.prompt_tokens = len(prompt)
        self.counters.prompt_tokens += len(prompt)

    def abort(self, request_id: str) -> bool:
        """End a request wherever its sequences stand; their pages of every kind are free when this returns.

        False if there is no such request (any more).
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.finish([s for s in request.sequences if s.status is not Status.FINISHED], "abort")
        return True

    def finish(self, sequences: Iterable[Seq], reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End sequences now, for a reason found outside (a stop string, a vanished client)."""
        self._finish([(sequence, reason, stop_reason) for sequence in sequences])

    def preempt(self, sequence: Seq) -> None:
        """Stop a running sequence: its pages are free at once, its tokens are kept and computed again later."""
        assert sequence.status is Status.RUNNING, "only a running sequence can be preempted"
        self._vacate([sequence])
        sequence.status, sequence.queued = Status.PREEMPTED, self.clock()
        sequence.request.receipt.preemptions += 1
        self.waiting.add(sequence)
        self.counters.preemptions += 1

    def reset_prefix_cache(self) -> None:
        """Forget everything that no sequence is using."""
        if self.cache is not None:
            self.placement.unlock_passed()
            self.cache.reset()

    def distrust_prefix_cache(self) -> None:
        """What is cached may be wrong: no later request gets any of it, nor what those that run make of it, who may
        have read it, or be about to in the step that is out."""
        if self.cache is not None:
            self.placement.unlock_passed()
            self.cache.distrust()
            for sequence in self.running:
                sequence.names = None

    # -- a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, its pages committed. None when nothing is left to do, or nothing before a flight settles."""
        assert len(self._flights) < 2, "settle the step before the last one before scheduling the next"
        if not self.requests:
            return None
        decodes = self._unshared is None or not self._unshared.has_chunks
        self._share_full()
        self._give_back_passed(late=decodes and not self.waiting)
        if self.waiting:
            self._admission.oldest()
        chunks, budget = self._chunks()
        if self.waiting:
            chunks = self._admission.admit(chunks, budget)
        secured = self._look_ahead(chunks) or self._secure(chunks)
        if secured is None:
            assert self._flights, "nobody can run, and no flight will change that"
            return None
        return self._step(*secured)

    def settle(self, step: Step, results: Sequence[Result]) -> list[Event]:
        """Take in what the oldest flight sampled. Events of sequences that have not ended before, in order: one per
        result, but for requests that are told of `at_end` alone, whose sequences have one when they end. A problem
        ends its sequence."""
        assert self._flights, "no step is in flight"
        flight = self._flights[0]
        assert flight.step is step, "steps are settled in the order they were scheduled"
        assert len(results) == len(flight.sampled), f"{len(results)} results for {len(flight.sampled)} samples"
        self._flights.popleft()
        found, at = Results.of(results), self.running.at
        problems = {i: sampled.problem for i, sampled in found.more.items() if sampled.problem is not None}
        here = flight.here(at)
        if problems:
            here[list(problems)] = False
        self.counters.generation_tokens += int(np.count_nonzero(here))
        told, odd = at.told[flight.rows] & here, flight.land(at, here, found.ids)
        ends: list[tuple[Seq, FinishReason, int | str | None]] = []
        for i in odd.tolist():
            sequence = flight.sampled[i]
            if sequence.status is Status.FINISHED:  # meanwhile
                continue
            if i in problems:
                end: tuple[FinishReason, int | str | None] | None = ("abort", problems[i])
            else:
                if not here[i]:  # preempted
                    sequence.output.append(int(found.ids[i]))
                    self.counters.generation_tokens += 1
                end = self._end(sequence, int(found.ids[i]))
            told[i] = end is not None or not sequence.request.at_end
            if end is not None:
                ends.append((sequence, *end))
        events = flight.events(found, told)
        self._finish(ends)
        if problems:
            self.distrust_prefix_cache()
        return events

    # -- inside: who runs -----------------------------------------------------------------------------------

    @property
    def _admission(self) -> Admission:
        return Admission(self.config, self.waiting, self.running, self.placement, self._room, self._sharing)

    def _chunks(self) -> tuple[Int64, int]:
        """Tokens for each running sequence, and what is left of the step's budget.

        Those with one token to go (decodes) come first, then prefills by age.
        """
        rows, at = self.running.rows, self.running.at
        chunks = at.todo(rows, at.pending(rows))
        decodes = int(np.count_nonzero(chunks == 1))
        budget = self.config.max_num_batched_tokens - decodes
        for i in (chunks > 1).nonzero()[0].tolist() if decodes < len(chunks) else ():
            chunks[i] = min(int(chunks[i]), budget)
            budget -= int(chunks[i])
        return chunks, budget

    def _look_ahead(self, chunks: Int64) -> tuple[Plan, Growth, Int64] | None:
        """While all decode, pages are had for some steps at once, where there is room for that: it is cheaper together.
        None: this is no step for it."""
        if self.counters.steps % self._together or not len(chunks) or np.count_nonzero(chunks != 1):
            return None
        rows, past = self.running.rows, self.running.past
        left = self.running.at.most_cached[rows] - past
        growth = self.placement.growth(rows, past, np.minimum(left, self._together))
        plan = self._room.plan(growth.demand)
        return (plan, growth, chunks) if isinstance(plan, Plan) else None

    def _secure(self, chunks: Int64) -> tuple[Plan | None, Growth, Int64] | None:
        """A plan for the chunks (None if they take no page), after making them smaller and preempting, if it must be,
        and what is left of them. None: wait for a flight."""
        while np.count_nonzero(chunks):
            growth = self.placement.growth(self.running.rows, self.running.past, chunks)
            plan = self._room.plan(growth.demand) if len(growth.rows) else None
            if plan is None or isinstance(plan, Plan):
                return plan, growth, chunks
            if self._sharing.catch_up(self.running):
                continue  # what two have computed is there once now
            self.counters.refusals += 1
            self.pool.refused(plan)
            fewer = chunks.tolist()
            if self._room.shrink(self.running, fewer):
                chunks = np.array(fewer, np.int64)
                continue
            if len(self.running) == 1 and self.placement.restoring(self.running[0].row):
                self._restart_cold()
                chunks = self._chunks()[0]
                continue
            if any(s.is_complete for s in self.running):
                return None  # they end when their flight settles: their pages come without a preemption
            assert len(self.running) > 1, f"the oldest sequence does not fit an empty pool: {plan.message}"
            self.preempt(self.running[-1])
            chunks = chunks[:-1]
        return None

    def _end(self, sequence: Seq, token: int) -> tuple[FinishReason, int | None] | None:
        """Why the sequence is complete with its newest token, or None."""
        params = sequence.request.params
        if token in sequence.ends and len(sequence.output) >= params.min_tokens:
            return "stop", None if token in self._eos and not params.ignore_eos else token
        return ("length", None) if len(sequence.output) >= sequence.limit else None

    # -- inside: pages and bookkeeping ----------------------------------------------------------------------

    def _step(self, plan: Plan | None, growth: Growth, chunks: Int64) -> Step:
        """Commit the plan, write down what the executor has to do, and count it as done."""
        if plan is not None:
            self.placement.commit(plan, growth)
        flight = Flight.take_off(self.running, chunks, self.placement, self.pool.take_delta(), self.clock)
        self._unshared = flight
        self._flights.append(flight)
        self.counters.steps += 1
        self.counters.computed_tokens += len(flight.step.tokens)
        return flight.step

    def _give_back_passed(self, *, late: bool) -> None:
        """What windows have passed. While all decode and nobody waits, mere locks may be given back a page later: it is
        cheaper together."""
        late = late and (self.counters.steps + 1) % self._locked_for > 0
        give_back = self.placement.free_passed if late else self.placement.unbind_passed
        give_back(self.running.rows, self.running.past)

    def _restart_cold(self) -> None:
        """The last one running holds a snapshot and finds no room for its own state beside it: do without the hit."""
        (sequence,) = self.running
        self._vacate([sequence])
        sequence.cold = True
        self._admission.run(sequence, None)

    def _share_full(self) -> None:
        """Full pages go to the prefix cache, as far as their tokens are here; of those that run no more, `_vacate` sees
        to it. While all decode, not in every step: it is cheaper together, and before anybody starts, who might find
        them, `Sharing.catch_up` is called besides.
        """
        flight, self._unshared = self._unshared, None
        if self.cache is None or not self.running:
            return
        if (flight is not None and flight.has_chunks) or self.counters.steps % self._together == self._together // 2:
            self._sharing.catch_up(self.running)
        for sequence in flight.computing if flight is not None else ():  # a prefill chunk ends here, at a cut or not
            if sequence.status is Status.RUNNING:
                self._sharing.keep(sequence)
        self._sharing.save()

    def _vacate(self, sequences: list[Seq]) -> None:
        """They run no more. Rows and pages are free at once, though flights may use them: the next owners are planned,
        so run, later."""
        self._sharing.leave(sequences)
        for sequence in sequences:
            sequence.request.receipt.take(self.placement.taken(sequence.row), self._page_bytes)
        self.placement.vacate([s.row for s in sequences])
        self.running.remove(sequences)

    def _finish(self, ended: list[tuple[Seq, FinishReason, int | str | None]]) -> None:
        if not ended:
            return
        running = [s for s, _, _ in ended if s.status is Status.RUNNING]
        if running:
            self._vacate(running)
            early = sum(reason != "length" for s, reason, _ in ended if s.status is Status.RUNNING)
            self._room.ended(self.counters.generation_tokens, early)
        for sequence, reason, stop_reason in ended:
            assert sequence.status is not Status.FINISHED, "a sequence ends once"
            sequence.status, sequence.finish_reason, sequence.stop_reason = Status.FINISHED, reason, stop_reason
            self.counters.finished += 1
            if sequence.request.is_finished:
                del self.requests[sequence.request.request_id]
        self.waiting.drop_finished()

    def _impossible(self, prompt: int, limit: int) -> str:
        need = capacity.obstacle(self.pool, prompt + limit - 1, self._most_tokens)
        return (
            f"a prompt of {prompt:,} tokens and {limit:,} tokens of output need {need.text}: the longest sequence that "
            f"fits has {self.longest + 1:,} tokens; shorten it, lower max_tokens, or {need.remedy}"
        )
