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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.prefix import Match, PrefixCache
from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.placement import Growth, Placement
from isthmus.engine.room import Newcomer, Room
from isthmus.engine.rows import Bool, Int64
from isthmus.engine.running import Running
from isthmus.engine.samples import Samples, is_plain, looks_back, score_spans, tokens_of
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
        together: so many steps' pages are had and shared at once while all decode; 1: each when it is needed. Fewer
            where a window passes a page in less.
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
        self.waiting: deque[Seq] = deque()
        self.requests: dict[str, Request] = {}  # those with a sequence that has not ended
        self._eos = frozenset(eos_token_ids)
        self._page_size = page_size or capacity.page_size(pool.groups.values())
        self._page_bytes = {name: group.spec.page_bytes for name, group in pool.groups.items()}
        self.cache = PrefixCache(pool, self._page_size) if prefix_caching else None
        self.placement = Placement(pool, config.max_num_seqs, self.cache)
        self._sharing = Sharing(self.cache, self.placement) if self.cache is not None else None
        windows = (max(1, group.window - 1) for group in pool.groups.values() if group.window is not None)
        self._together = min([together, *windows])
        self._room = Room(pool, self.placement, self.cache, self._page_size, max_cached_tokens)
        self.clock = clock
        self._asked: Newcomer | None = None  # the oldest that waits, as it was priced last
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
        self._share_full()
        self.placement.unbind_passed(self.running.rows, self.running.past)
        self._admit_oldest()
        chunks, budget = self._chunks()
        if self.waiting:
            chunks = self._admit(chunks, budget)
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
        here = at.owner[flight.rows] == flight.owners  # who has run ever since, and gets a token
        here[list(problems)] = False
        self.counters.generation_tokens += int(np.count_nonzero(here))
        told, ended = here & at.told[flight.rows], here & False
        ended[here] = self._append(flight, here, found.ids)
        ends: list[tuple[Seq, FinishReason, int | str | None]] = []
        for i in np.flatnonzero(ended | ~here).tolist():
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
        events = self._events(flight, found, told)
        self._finish(ends)
        if problems:
            self.distrust_prefix_cache()
        return events

    def _append(self, flight: _Flight, here: Bool, tokens: NDArray[np.int32]) -> Bool:
        """The samples of a flight that are `here` go to their sequences. Returns which of these may end with it."""
        rows, sampled = flight.rows, flight.sampled
        if not here.all():
            which = np.flatnonzero(here)
            rows, tokens, sampled = rows[which], tokens[which], [sampled[i] for i in which.tolist()]
        over, full = self.running.at.append(rows, tokens)
        for i in np.flatnonzero(full).tolist():
            sampled[i].gather()
        return over

    def _events(self, flight: _Flight, found: Results, told: Bool) -> list[Event]:
        if told.all():
            return list(zip(flight.sampled, found, strict=True))
        which = np.flatnonzero(told).tolist()
        results = list(found) if which else []
        return [(flight.sampled[i], results[i]) for i in which]

    # -- inside: who runs -----------------------------------------------------------------------------------

    def _admit_oldest(self) -> None:
        """The oldest of all runs whether it fits beside the others or not: it fits alone, and they make room."""
        if not self.waiting or len(self.running) == self.config.max_num_seqs or self.waiting[0].has_pending:
            return
        if not self.running or self.waiting[0].order < self.running[0].order:
            self._share_behind()
            self._start(self.waiting[0], self._match(self.waiting[0]))

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

    def _admit(self, chunks: Int64, budget: int) -> Int64:
        """Let the oldest waiting sequences run, as many as fit beside those that do. Returns everyone's tokens.

        They are admitted only if their whole prompt fits now and what everyone is expected to grow by (`fits_ahead`),
        so that admission does not lead straight to preemption. They are asked for in groups of doubling size; of a
        group that does not fit, the youngest stay in the queue. Nothing is done for those that are refused.
        """
        group = 1
        while self.waiting:
            rows = self.config.max_num_seqs - len(self.running)
            if rows < 1 or budget < 1:  # else what kept it before still holds
                self.waiting[0].waited_for = "rows" if rows < 1 else "budget"
                break
            newcomers = self._newcomers(min(group, rows), budget)
            while newcomers and not self._room.fits_ahead(self.running, chunks, newcomers):
                refused = newcomers.pop()
                refused.sequence.waited_for = "memory"
                if refused.match is not None and self._sharing is not None:
                    self._sharing.want(refused.match)
            if newcomers and self._share_behind():
                continue  # they may find more now
            if newcomers:
                chunks, budget = self._start_all(newcomers, chunks, budget)
            if len(newcomers) < group:
                break
            group *= 2
        return chunks

    def _start_all(self, newcomers: list[Newcomer], chunks: Int64, budget: int) -> tuple[Int64, int]:
        """They run; everyone's tokens, in order, and what is left of the budget."""
        tokens = dict(zip(self.running, chunks.tolist(), strict=True))
        for new in newcomers:
            self._start(new.sequence, new.match)
        rows = np.array([new.sequence.row for new in newcomers])
        todo = self.running.at.todo(rows, np.zeros(len(rows), np.bool_))
        for new, n in zip(newcomers, todo.tolist(), strict=True):
            tokens[new.sequence] = min(n, new.chunk)
            budget -= tokens[new.sequence]
        return np.array([tokens[sequence] for sequence in self.running], np.int64), budget

    def _newcomers(self, most: int, budget: int) -> list[Newcomer]:
        """The next ones that could start, if there is room for them, under the budget of the step."""
        newcomers: list[Newcomer] = []
        starting: dict[Seq, int] = {}
        for sequence in self.waiting:
            if len(newcomers) == most or budget < 1:
                break
            if self._sharing is not None and self._sharing.is_coming(sequence, starting):
                sequence.waited_for = "prefix"  # a sibling is about to compute the prompt for it
            elif not sequence.has_pending:
                match = self._match(sequence)
                past, cuts = self._outset(sequence, match)
                chunk = min(min(cuts, default=sequence.length) - past, budget)
                newcomers.append(self._newcomer(sequence, match, chunk))
                starting[sequence] = past
                budget -= chunk
        return newcomers

    def _newcomer(self, sequence: Seq, match: Match | None, chunk: int) -> Newcomer:
        """The one that was refused in the step before is mostly the one that is asked for again."""
        last = self._asked
        if last is None or last.sequence is not sequence or last.match is not match or last.chunk != chunk:
            last = Newcomer(sequence, match, sequence.length, sequence.most_cached, chunk)
            if sequence is self.waiting[0]:
                self._asked = last
        return last

    def _match(self, sequence: Seq) -> Match | None:
        return None if self._sharing is None else self._sharing.match(sequence)

    def _outset(self, sequence: Seq, match: Match | None) -> tuple[int, tuple[int, ...]]:
        return (0, ()) if match is None or self._sharing is None else self._sharing.outset(sequence, match)

    def _look_ahead(self, chunks: Int64) -> tuple[Plan, Growth, Int64] | None:
        """While all decode, pages are had for some steps at once, where there is room for that: it is cheaper together.
        None: this is no step for it."""
        if self.counters.steps % self._together or not len(chunks) or (chunks != 1).any():
            return None
        rows, past = self.running.rows, self.running.past
        left = self.running.at.most_cached[rows] - past
        growth = self.placement.growth(rows, past, np.minimum(left, self._together))
        plan = self._room.plan(growth.demand)
        return (plan, growth, chunks) if isinstance(plan, Plan) else None

    def _secure(self, chunks: Int64) -> tuple[Plan | None, Growth, Int64] | None:
        """A plan for the chunks (None if they take no page), after making them smaller and preempting, if it must be,
        and what is left of them. None: wait for a flight."""
        while chunks.any():
            growth = self.placement.growth(self.running.rows, self.running.past, chunks)
            plan = self._room.plan(growth.demand) if len(growth.rows) else None
            if plan is None or isinstance(plan, Plan):
                return plan, growth, chunks
            if self._share_behind():
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
        at = self.running.at
        sequences, rows, counts = list(self.running), self.running.rows, chunks
        if not chunks.all():
            busy = np.flatnonzero(chunks)
            sequences, rows, counts = [sequences[i] for i in busy.tolist()], rows[busy], chunks[busy]
        past, pending = at.past[rows], self._pending(rows)
        begun = at.begun[rows]
        if not begun.all():
            for i in np.flatnonzero(~begun).tolist():
                sequences[i].stop_waiting(self.clock())
            at.begun[rows] = True
        if plan is not None:
            self.placement.commit(plan, growth)
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

    def _start(self, sequence: Seq, match: Match | None) -> None:
        """Let a waiting sequence run."""
        self.waiting.remove(sequence)
        self._run(sequence, match)

    def _run(self, sequence: Seq, match: Match | None) -> None:
        """Give a sequence a row, and whatever of it is cached."""
        row = self.placement.take_row(match)
        sequence.status, self._asked = Status.RUNNING, None
        past, cuts = (0, ()) if match is None or self._sharing is None else self._sharing.start(sequence, match)
        self.running.add(sequence, row, past, cuts)

    def _restart_cold(self) -> None:
        """The last one running holds a snapshot and finds no room for its own state beside it: do without the hit."""
        (sequence,) = self.running
        self._vacate([sequence])
        sequence.cold = True
        self._run(sequence, None)

    def _share_full(self) -> None:
        """Full pages go to the prefix cache, as far as their tokens are here; of those that run no more, `_vacate` sees
        to it. While all decode, not in every step: it is cheaper together, and before anybody starts, who might find
        them, `_share_behind` is called besides.
        """
        flight, self._unshared = self._unshared, None
        if self._sharing is None or not self.running:
            return
        chunked = flight is not None and (len(flight.step.tokens) > len(flight.step.rows) or flight.computing)
        if chunked or self.counters.steps % self._together == self._together // 2:
            self._share_behind()
        for sequence in flight.computing if flight is not None else ():  # a prefill chunk ends here, at a cut or not
            if sequence.status is Status.RUNNING:
                self._sharing.keep(sequence)
        self._sharing.save()

    def _share_behind(self) -> bool:
        """Share all full pages of those that run; were there any?"""
        if self._sharing is None or not self.running:
            return False
        rows, at = self.running.rows, self.running.at
        behind = self.placement.to_share(rows, np.minimum(at.past[rows], at.known[rows])).tolist()
        sharing = [sequence for sequence in (self.running[i] for i in behind) if sequence.names is not None]
        if sharing:
            self._sharing.share(sharing)
            self._sharing.save()
        return bool(sharing)

    def _vacate(self, sequences: list[Seq]) -> None:
        """They run no more. Rows and pages are free at once, though flights may use them: the next owners are planned,
        so run, later."""
        if self._sharing is not None:
            self._sharing.share(sequences)
            for sequence in sequences:
                self._sharing.keep(sequence)
            self._sharing.save()
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
