"""Which sequences run in the next step, with how many tokens, on which pages.

    schedule: share what the last step computes -> unbind what windows have passed -> tokens for those that run ->
              admit -> one plan -> one commit -> Step
    settle:   append what was sampled, end what is complete

Order is age: a smaller `Sequence.order` goes first everywhere. `running` and `waiting` are sorted by it, and every
running sequence is scheduled before any waiting one.

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
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.prefix import PrefixCache
from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.placement import Placement
from isthmus.engine.room import Room
from isthmus.engine.rows import Bool, Int64
from isthmus.engine.running import Running
from isthmus.engine.samples import Samples, is_plain, looks_back, score_spans, tokens_of
from isthmus.engine.sequence import FinishReason, Request, Status, sequence_seed
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.sharing import Sharing
from isthmus.engine.step import Result, Sampled, Step
from isthmus.memory import Plan, Pool
from isthmus.params import RequestError


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


Event: TypeAlias = tuple[Seq, Result]
"""One token for one sequence, or a problem instead. Whether it ended the sequence: `sequence.finish_reason`."""


@dataclass(eq=False, slots=True)
class _Flight:
    """A step that was handed out and not settled."""

    step: Step
    sequences: list[Seq]
    sampled: list[Seq]  # owners of `step.samples`
    rows: Int64  # of `sampled`
    owners: Int64  # of those rows, by `Rows.owner`
    computing: list[Seq]  # those with prompt tokens in it


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.config = config
        self.max_model_len = max_model_len
        self.counters = Counters()
        self.running = Running(config.max_num_seqs)
        self.waiting: deque[Seq] = deque()
        self.requests: dict[str, Request] = {}  # those with a sequence that has not ended
        self._eos = frozenset(eos_token_ids)
        self._page_size = page_size or capacity.page_size(pool.groups.values())
        self._page_bytes = {name: group.spec.page_bytes for name, group in pool.groups.items()}
        self.cache = PrefixCache(pool, self._page_size) if prefix_caching else None
        self.placement = Placement(pool, config.max_num_seqs, self.cache)
        self._sharing = Sharing(self.cache, self.placement) if self.cache is not None else None
        self._room = Room(pool, self.placement, self.cache, self._page_size, max_cached_tokens)
        self.clock = clock
        self._arrivals = 0
        self._flights: deque[_Flight] = deque()  # oldest first
        self._unshared: _Flight | None = None  # the newest step, until what it computes is shared
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
            self.waiting.append(sequence)
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
        self.waiting.insert(bisect_left(self.waiting, sequence.order, key=_age), sequence)
        self.counters.preemptions += 1

    def reset_prefix_cache(self) -> None:
        """Forget everything that no sequence is using."""
        if self.cache is not None:
            self.cache.reset()

    def distrust_prefix_cache(self) -> None:
        """What is cached may be wrong: no later request gets any of it, nor what those that run make of it, who may
        have read it, or be about to in the step that is out."""
        if self.cache is not None:
            self.cache.distrust()
            for sequence in self.running:
                sequence.names = None

    # -- a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, its pages committed. None when nothing is left to do, or nothing before a flight settles."""
        assert len(self._flights) < 2, "settle the step before the last one before scheduling the next"
        if not self.requests:
            return None
        self._share_newest()
        self.placement.unbind_passed(self.running.rows, self.running.past)
        self._admit_oldest()
        chunks, budget = self._chunks()
        if self.waiting:
            chunks = self._admit(chunks.tolist(), budget)
        plan, chunks = self._secure(chunks) if chunks.any() else (None, chunks)
        if plan is None or not chunks.any():
            assert self._flights, "nobody can run, and no flight will change that"
            return None
        return self._step(plan, chunks)

    def settle(self, step: Step, results: Sequence[Result]) -> list[Event]:
        """Take in what the oldest flight sampled. One event per result, for sequences that have not ended; a problem
        ends its sequence."""
        assert self._flights, "no step is in flight"
        flight = self._flights[0]
        assert flight.step is step, "steps are settled in the order they were scheduled"
        assert len(results) == len(flight.sampled), f"{len(results)} results for {len(flight.sampled)} samples"
        self._flights.popleft()
        events: list[Event] = []
        ended: list[tuple[Seq, FinishReason, int | str | None]] = []
        finished, tokens, problems = Status.FINISHED, 0, False
        for sequence, result in zip(flight.sampled, results, strict=True):
            if isinstance(result, Sampled) and result.problem is not None:
                problems = True
                if sequence.status is not finished:
                    events.append((sequence, result))
                    ended.append((sequence, "abort", result.problem))
                continue
            if sequence.status is finished:  # meanwhile
                continue
            events.append((sequence, result))
            token = result if isinstance(result, int) else result.token_id
            output = sequence.output
            output.append(token)
            tokens += 1
            if len(output) >= sequence.limit or token in sequence.ends:
                end = self._end(sequence, token)
                if end is not None:
                    ended.append((sequence, *end))
        self.counters.generation_tokens += tokens
        self._finish(ended)
        if problems:
            self.distrust_prefix_cache()
        return events

    # -- inside: who runs -----------------------------------------------------------------------------------

    def _admit_oldest(self) -> None:
        """The oldest of all runs whether it fits beside the others or not: it fits alone, and they make room."""
        if not self.waiting or len(self.running) == self.config.max_num_seqs or self.waiting[0].has_pending:
            return
        if not self.running or self.waiting[0].order < self.running[0].order:
            self._start(self.waiting[0])

    def _chunks(self) -> tuple[Int64, int]:
        """Tokens for each running sequence, and what is left of the step's budget.

        Those with one token to go (decodes) come first, then prefills by age.
        """
        rows = self.running.rows
        chunks = self.running.at.todo(rows, self._pending(rows))
        budget = self.config.max_num_batched_tokens - int(np.count_nonzero(chunks == 1))
        for i in np.flatnonzero(chunks > 1).tolist():
            chunks[i] = min(int(chunks[i]), budget)
            budget -= int(chunks[i])
        return chunks, budget

    def _pending(self, rows: Int64) -> Bool:
        """Is the newest token of those that have these rows in flight?"""
        pending = np.zeros(self.config.max_num_seqs, np.bool_)
        for flight in self._flights:
            pending[flight.rows[self.running.at.owner[flight.rows] == flight.owners]] = True
        found: Bool = pending[rows]
        return found

    def _admit(self, chunks: list[int], budget: int) -> Int64:
        """Let the oldest waiting sequences run, as many as fit beside those that do. Returns everyone's tokens.

        They are admitted only if their whole prompt fits now and what everyone is expected to grow by (`fits_ahead`),
        so that admission does not lead straight to preemption. They start in groups of doubling size; of a group that
        does not fit, the youngest go back to the queue.
        """
        group = 1
        while self.waiting:
            started, rows = [], self.config.max_num_seqs - len(self.running)
            if rows < 1 or budget < 1:  # else what kept it before still holds
                self.waiting[0].waited_for = "rows" if rows < 1 else "budget"
            for sequence in list(islice(self._startable(), min(group, rows))):
                if budget < 1:
                    break
                at = self._start(sequence)
                row = np.array([sequence.row])
                chunks.insert(at, min(int(self.running.at.todo(row, np.zeros(1, np.bool_))[0]), budget))
                budget -= chunks[at]
                started.append(sequence)
            fits = not started or self._room.fits_ahead(self.running, chunks)
            while started and not fits:
                started[-1].waited_for = "memory"
                at = self.running.index(started[-1])
                budget += chunks.pop(at)
                self._unstart(started.pop())
                fits = self._room.fits_ahead(self.running, chunks)
            if len(started) < group:
                break
            group *= 2
        return np.array(chunks, np.int64)

    def _startable(self) -> Iterator[Seq]:
        """Waiting sequences by age, but for those whose sibling is about to compute the prompt for them, or whose
        newest token is not here yet."""
        for sequence in list(self.waiting):
            if self._sharing is not None and self._sharing.is_coming(sequence):
                sequence.waited_for = "prefix"
            elif not sequence.has_pending:
                yield sequence

    def _secure(self, chunks: Int64) -> tuple[Plan | None, Int64]:
        """A plan for the chunks, after making them smaller and preempting, if it must be, and what is left of them.
        None: wait for a flight."""
        while True:
            plan = self._room.plan(self.running, chunks)
            if isinstance(plan, Plan):
                return plan, chunks
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
                return None, chunks  # they end when their flight settles: their pages come without a preemption
            assert len(self.running) > 1, f"the oldest sequence does not fit an empty pool: {plan.message}"
            self.preempt(self.running[-1])
            chunks = chunks[:-1]

    def _end(self, sequence: Seq, token: int) -> tuple[FinishReason, int | None] | None:
        """Why the sequence is complete with its newest token, or None."""
        params = sequence.request.params
        if len(sequence.output) >= params.min_tokens:
            if token in self._eos and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return ("length", None) if len(sequence.output) >= sequence.limit else None

    # -- inside: pages and bookkeeping ----------------------------------------------------------------------

    def _step(self, plan: Plan, chunks: Int64) -> Step:
        """Commit the plan, write down what the executor has to do, and count it as done."""
        at, busy = self.running.at, np.flatnonzero(chunks)
        sequences, rows, counts = list(self.running), self.running.rows, chunks
        if len(busy) < len(chunks):
            sequences, rows, counts = [sequences[i] for i in busy.tolist()], rows[busy], chunks[busy]
        past, pending = at.past[rows], self._pending(rows)
        for i in np.flatnonzero(~at.begun[rows]).tolist():
            sequences[i].stop_waiting(self.clock())
        at.begun[rows] = True
        self.placement.commit(plan, rows, past, counts)
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        chunked = np.flatnonzero(past < at.prompt[rows]).tolist()
        computing = [sequences[i] for i in chunked]
        scores = score_spans((sequences[i], int(counts[i]), int(query_start[i])) for i in chunked)
        tokens = tokens_of(sequences, past, counts, pending)
        sampled, samples, plain = self._go_on(sequences, rows, past + counts, query_start[1:] - 1)
        step = Step(
            delta=self.pool.take_delta(),
            block_writes=self.placement.blocks.take_writes(),
            tokens=tokens,
            query_start=query_start,
            past=past.astype(np.int32),
            rows=rows.astype(np.int32),
            samples=samples,
            states=self.placement.states(rows),
            scores=scores,
            plain=plain,
        )
        self._unshared = _Flight(step, sequences, *sampled, computing)
        self._flights.append(self._unshared)
        self.counters.steps += 1
        self.counters.computed_tokens += len(tokens)
        return step

    def _go_on(
        self, sequences: list[Seq], rows: Int64, past: Int64, last: NDArray[np.int32]
    ) -> tuple[tuple[list[Seq], Int64, Int64], Samples, bool]:
        """Sequences have gone on to `past`, with token `last[i]` of the step. Who has no token left gets one more,
        which is pending: `((who, rows, owners), what is sampled, whether all of it is plain)`."""
        at = self.running.at
        at.past[rows] = past
        length = at.length[rows]
        through = past == length
        if not through.all():
            which = np.flatnonzero(through)
            sequences, rows, length, last = (
                [sequences[i] for i in which.tolist()],
                rows[which],
                length[which],
                last[which],
            )
        at.length[rows] = length + 1
        plain = bool((length >= at.plain_from[rows]).all())
        return (sequences, rows, at.owner[rows]), Samples(sequences, rows, last, length), plain

    def _start(self, sequence: Seq) -> int:
        """Give a waiting sequence a row, and whatever of it is cached; its index among the running."""
        match = None if self._sharing is None else self._sharing.match(sequence)
        row = self.placement.take_row(match)
        self.waiting.remove(sequence)
        sequence.resume, sequence.status = sequence.status, Status.RUNNING
        past, cuts = (0, ()) if match is None or self._sharing is None else self._sharing.start(sequence, match)
        return self.running.add(sequence, row, past, cuts)

    def _restart_cold(self) -> None:
        """The last one running holds a snapshot and finds no room for its own state beside it: do without the hit."""
        (sequence,) = self.running
        self._unstart(sequence)
        sequence.cold = True
        self._start(sequence)

    def _unstart(self, sequence: Seq) -> None:
        """It does not fit after all: as if `_start` had not been called."""
        self._vacate([sequence])
        sequence.status = sequence.resume
        self.waiting.insert(bisect_left(self.waiting, sequence.order, key=_age), sequence)

    def _share_newest(self) -> None:
        """What the newest step computes goes to the prefix cache, of those that still run; for the others, `_vacate`.

        All tokens that went into it are here, because the step before it was settled.
        """
        flight, self._unshared = self._unshared, None
        if flight is None or self._sharing is None:
            return
        before, n = flight.step.past // self._page_size, np.diff(flight.step.query_start)
        full = np.flatnonzero((flight.step.past + n) // self._page_size > before)
        filled = [flight.sequences[i] for i in full.tolist()]
        self._sharing.share(s for s in filled if s.status is Status.RUNNING)
        for sequence in flight.computing:  # a prefill chunk ends here, at a cut or not
            if sequence.status is Status.RUNNING:
                self._sharing.keep(sequence)

    def _vacate(self, sequences: list[Seq]) -> None:
        """They run no more. Rows and pages are free at once, though flights may use them: the next owners are planned,
        so run, later."""
        if self._sharing is not None:
            self._sharing.share(sequences)
            for sequence in sequences:
                self._sharing.keep(sequence)
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
        if any(s.status is Status.FINISHED for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if s.status is not Status.FINISHED)

    def _impossible(self, prompt: int, limit: int) -> str:
        need = capacity.obstacle(self.pool, prompt + limit - 1, self._most_tokens)
        return (
            f"a prompt of {prompt:,} tokens and {limit:,} tokens of output need {need.text}: the longest sequence that "
            f"fits has {self.longest + 1:,} tokens; shorten it, lower max_tokens, or {need.remedy}"
        )


def _age(sequence: Seq) -> tuple[int, int]:
    return sequence.order
