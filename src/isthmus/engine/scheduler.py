"""Which sequences run in the next step, with how many tokens, on which pages.

    schedule: unbind what windows have passed -> tokens for those that run -> admit -> one plan -> one commit -> Step
    settle:   count what was cached, append what was sampled, end what is complete

Order is age: a smaller `Sequence.order` goes first everywhere. `running` and `waiting` are sorted by it, and every
running sequence is scheduled before any waiting one.

Memory has one predicate, `Pool.plan` for the step's whole demand, priced by one function, `Placement.demand`. When
it refuses, cheapest first (compaction is inside plan): do not admit; shrink prefill chunks, the youngest first, which
may also wait with what it holds; preempt the youngest. The oldest always gets at least one token, so it finishes,
so everyone does: `add` has refused what an empty pool could not take to its end.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.prefix import Match, PrefixCache
from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.placement import Placement
from isthmus.engine.samples import sample_row, score_spans
from isthmus.engine.sequence import FinishReason, Request, Status, sequence_seed
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.step import Sampled, Step
from isthmus.memory import Plan, Pool, Refusal
from isthmus.params import RequestError

Int64 = NDArray[np.int64]
_NOTHING: Mapping[str, int] = {}


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


@dataclass(frozen=True)
class Event:
    """One token for one sequence, or a problem instead. Whether it ended the sequence: `sequence.finish_reason`."""

    sequence: Seq
    sampled: Sampled


@dataclass(frozen=True)
class _Flight:
    """A step that was handed out and not settled."""

    step: Step
    sequences: list[Seq]
    counts: list[int]
    sampled: list[Seq]  # owners of `step.samples`


class Scheduler:
    """Continuous batching over one pool. Torch-free; nothing but this object changes the pool.

    Args:
        pool: the arena's bookkeeping, all of it this scheduler's.
        config: how many sequences, how many tokens a step.
        max_model_len: prompt and output of a sequence never exceed it.
        eos_token_ids: ids that end a sequence unless its request says `ignore_eos`.
        max_cached_tokens: cap on what all sequences cache together, in whole pages; None: what the pool holds.
        prefix_caching: keep full pages of sequences that ended, for others that start with the same tokens.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.config = config
        self.max_model_len = max_model_len
        self.counters = Counters()
        self.running: list[Seq] = []
        self.waiting: deque[Seq] = deque()
        self.requests: dict[str, Request] = {}  # those with a sequence that has not ended
        self._eos = frozenset(eos_token_ids)
        self._page_size = capacity.page_size(pool.groups.values())
        capped = max_cached_tokens is not None and "tokens" in pool.covering
        self._most_pages = (max_cached_tokens or 0) // self._page_size if capped else None
        self._page_bytes = {name: group.spec.page_bytes for name, group in pool.groups.items()}
        self.cache = PrefixCache(pool, self._page_size) if prefix_caching else None
        self.placement = Placement(pool, config.max_num_seqs, self.cache)
        self.clock = clock
        self._arrivals = 0
        self._flight: _Flight | None = None
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
        for i in range(params.n):
            sequence = Seq(request, i, (arrival, i), sequence_seed(params.seed, i), limit, prompt, queued=self.clock())
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
        self.running.remove(sequence)
        sequence.status = Status.PREEMPTED
        sequence.past, sequence.cuts, sequence.queued = 0, (), self.clock()
        sequence.request.receipt.preemptions += 1
        self.waiting.insert(bisect_left(self.waiting, sequence.order, key=_age), sequence)
        self.counters.preemptions += 1

    def reset_prefix_cache(self) -> None:
        """Forget everything that no sequence is using."""
        if self.cache is not None:
            self.cache.reset()

    # -- a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, its pages committed; None when nothing is left to do."""
        assert self._flight is None, "settle the last step before scheduling the next"
        if not self.requests:
            return None
        self.placement.unbind_passed(_array([s.row for s in self.running]), _array([s.past for s in self.running]))
        self._admit_oldest()
        chunks, budget = self._chunks()
        self._admit(chunks, budget)
        plan = self._secure(chunks)
        return self._step(plan, chunks)

    def settle(self, step: Step, sampled: Sequence[Sampled]) -> list[Event]:
        """Take in what a step did. One event per result, for sequences that still run; a problem ends its sequence."""
        flight, self._flight = self._flight, None
        assert flight is not None and flight.step is step, "only the step that was scheduled last can be settled"  # noqa: PT018
        assert len(sampled) == len(flight.sampled), f"{len(sampled)} results for {len(flight.sampled)} samples"
        ran = [(s, s.past) for s in flight.sequences if s.status is Status.RUNNING]
        for sequence, n in zip(flight.sequences, flight.counts, strict=True):
            if sequence.status is Status.RUNNING:
                sequence.past += n
        self._share(ran)
        events: list[Event] = []
        ended: list[tuple[Seq, FinishReason, int | str | None]] = []
        for sequence, result in zip(flight.sampled, sampled, strict=True):
            if sequence.status is not Status.RUNNING:  # aborted or preempted meanwhile
                continue
            events.append(Event(sequence, result))
            if result.problem is not None:
                ended.append((sequence, "abort", result.problem))
                continue
            sequence.output.append(result.token_id)
            self.counters.generation_tokens += 1
            end = self._end(sequence, result.token_id)
            if end is not None:
                ended.append((sequence, *end))
        self._finish(ended)
        if any(event.sampled.problem is not None for event in events):
            self.reset_prefix_cache()  # what was computed along with it must not come back in later requests
        return events

    # -- inside: who runs -----------------------------------------------------------------------------------

    def _admit_oldest(self) -> None:
        """The oldest of all runs whether it fits beside the others or not: it fits alone, and they make room."""
        if not self.waiting or len(self.running) == self.config.max_num_seqs:
            return
        if not self.running or self.waiting[0].order < self.running[0].order:
            self._start(self.waiting[0])

    def _chunks(self) -> tuple[list[int], int]:
        """Tokens for each running sequence, and what is left of the step's budget.

        Those with one token to go (decodes) come first, then prefills by age.
        """
        todo = [s.todo for s in self.running]
        budget = self.config.max_num_batched_tokens - todo.count(1)
        chunks = todo
        for i, n in enumerate(todo):
            if n > 1:
                chunks[i] = min(n, budget)
                budget -= chunks[i]
        return chunks, budget

    def _admit(self, chunks: list[int], budget: int) -> None:
        """Let the oldest waiting sequences run, as many as fit beside those that do.

        They are admitted only if their whole prompt fits now and a page more for everyone, so that admission does
        not lead straight to preemption. They start in groups of doubling size; of a group that does not fit, the
        youngest go back to the queue.
        """
        group = 1
        while self.waiting:
            started, rows = [], self.config.max_num_seqs - len(self.running)
            self.waiting[0].waited_for = "rows" if rows < 1 else "budget" if budget < 1 else None
            for sequence in list(islice(self._startable(), min(group, rows))):
                if budget < 1:
                    break
                at = self._start(sequence)
                chunks.insert(at, min(sequence.todo, budget))
                budget -= chunks[at]
                started.append(sequence)
            fits = self._fits_ahead(chunks)
            while started and not fits:
                started[-1].waited_for = "memory"
                at = self.running.index(started[-1])
                budget += chunks.pop(at)
                self._unstart(started.pop())
                fits = self._fits_ahead(chunks)
            if len(started) < group:
                return
            group *= 2

    def _startable(self) -> Iterator[Seq]:
        """Waiting sequences by age, but for those whose sibling is about to compute the prompt for them."""
        for sequence in list(self.waiting):
            first = sequence.request.sequences[0]
            running = self.cache is not None and sequence is not first and first.status is Status.RUNNING
            if running and self._page_size < len(first.prompt) and first.past < len(first.prompt):
                sequence.waited_for = "prefix"
            else:
                yield sequence

    def _fits_ahead(self, chunks: list[int]) -> bool:
        rows, past = self._rows(self.running), _array([s.past for s in self.running])
        new = _array(chunks)
        ahead = (
            np.minimum(
                _array([s.length for s in self.running]) + self._page_size,
                _array([s.most_cached for s in self.running]),
            )
            - past
        )
        now = self.placement.demand(rows, past, new)
        later = self.placement.demand(rows, past, np.maximum(ahead, new))
        return bool(self._price({name: max(now[name], later[name]) for name in now}, self.placement.idle))

    def _secure(self, chunks: list[int]) -> Plan:
        """A plan for the chunks, after making them smaller and preempting, if it must be."""
        while True:
            rows, past = self._rows(self.running), _array([s.past for s in self.running])
            demand = self.placement.demand(rows, past, _array(chunks))
            plan = self._price(demand)
            if not plan and self.cache is not None and self.cache.evict(demand, self._price):
                plan = self._price(demand)
            if isinstance(plan, Plan):
                return plan
            self.counters.refusals += 1
            self.pool.refused(plan)
            if not self._shrink(rows, past, chunks):
                if len(self.running) == 1 and self.placement.restoring(self.running[0].row):
                    self._restart_cold()
                    chunks[:] = self._chunks()[0]
                    continue
                assert len(self.running) > 1, f"the oldest sequence does not fit an empty pool: {plan.message}"
                self.preempt(self.running[-1])
                del chunks[-1]

    def _shrink(self, rows: Int64, past: Int64, chunks: list[int]) -> bool:
        """Cut the youngest prefill chunk that can be cut to what fits, or as far as it goes. False if none can."""
        i = max((i for i, n in enumerate(chunks) if n > 1), default=None)
        if i is None:
            return False
        low, high = (0 if 0 < i == len(chunks) - 1 else 1), chunks[i] - 1
        new = _array(chunks)
        while low < high:
            new[i] = middle = (low + high + 1) // 2
            if self._price(self.placement.demand(rows, past, new), self.placement.idle):
                low = middle
            else:
                high = middle - 1
        chunks[i] = low
        return True

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

    def _price(self, demand: Mapping[str, int], release: Mapping[str, int] = _NOTHING) -> Plan | Refusal:
        """The pool's answer, under the cap on cached tokens; `release` as in `Pool.plan`."""
        plan = self.pool.plan(demand, release)
        if self._most_pages is not None and isinstance(plan, Plan):
            cover = self.pool.covering["tokens"][0]
            pages = self.pool.ids("tokens").live + demand.get(cover, 0) - release.get(cover, 0)
            if pages > self._most_pages:
                return Refusal(demand, 0, f"{pages:,} pages of tokens would be cached, over --max-total-tokens")
        return plan

    def _step(self, plan: Plan, chunks: list[int]) -> Step:
        """Commit the plan and write down what the executor has to do."""
        sequences = [s for s, n in zip(self.running, chunks, strict=True) if n]
        counts = [n for n in chunks if n]
        for sequence in sequences:
            if sequence.queued is not None:
                self._note_wait(sequence)
        rows, past = _array([s.row for s in sequences]), _array([s.past for s in sequences])
        self.placement.commit(plan, rows, past, _array(counts))
        tokens: list[int] = []
        samples, sampled = [], []
        for sequence, n in zip(sequences, counts, strict=True):
            start, length = sequence.past, sequence.length
            if start + n < length or n > 1:
                tokens += sequence.tokens(start, start + n)
            else:
                tokens.append(sequence.output[-1] if sequence.output else sequence.prompt[-1])
            if start + n == length:
                samples.append(sample_row(sequence, len(tokens) - 1, length))
                sampled.append(sequence)
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        step = Step(
            delta=self.pool.take_delta(),
            block_writes=self.placement.blocks.take_writes(),
            tokens=np.array(tokens, np.int32),
            query_start=query_start,
            past=past.astype(np.int32),
            rows=rows.astype(np.int32),
            samples=tuple(samples),
            states=self.placement.states(rows),
            scores=score_spans(sequences, counts),
        )
        self._flight = _Flight(step, sequences, counts, sampled)
        self.counters.steps += 1
        self.counters.computed_tokens += len(tokens)
        return step

    def _start(self, sequence: Seq) -> int:
        """Give a waiting sequence a row, and whatever of it is cached; its index among the running."""
        match = self._match(sequence)
        sequence.row = self.placement.take_row(match)
        self.waiting.remove(sequence)
        sequence.resume, sequence.status = sequence.status, Status.RUNNING
        if match is not None:
            sequence.past = match.columns * self._page_size
            sequence.cuts = self._cuts(sequence, match)
        self._note_start(sequence, match)
        at = bisect_left(self.running, sequence.order, key=_age)
        self.running.insert(at, sequence)
        return at

    def _restart_cold(self) -> None:
        """The last one running holds a snapshot and finds no room for its own state beside it: do without the hit."""
        (sequence,) = self.running
        self._unstart(sequence)
        sequence.cold = True
        self._start(sequence)

    def _unstart(self, sequence: Seq) -> None:
        """It does not fit after all: as if `_start` had not been called."""
        self._vacate([sequence])
        self.running.remove(sequence)
        sequence.status, sequence.past, sequence.cuts = sequence.resume, 0, ()
        self.waiting.insert(bisect_left(self.waiting, sequence.order, key=_age), sequence)

    def _match(self, sequence: Seq) -> Match | None:
        """What the prefix cache has of it. Prompt logprobs need the prompt computed."""
        if self.cache is None or sequence.cold or sequence.request.params.prompt_logprobs is not None:
            return None
        if sequence.names is None:
            sequence.names = self.cache.names(sequence.request.cache_salt)
        sequence.names.extend(sequence.tokens(sequence.names.tokens, sequence.length))
        return self.cache.match(sequence.names, sequence.length)

    def _cuts(self, sequence: Seq, match: Match) -> tuple[int, ...]:
        """Where its prefill chunks end besides, so that somebody can come back: at a branch; with states, at the last
        boundary of what it has, where they must be saved on the spot."""
        assert self.cache is not None
        cuts = {match.branch * self._page_size}
        if self.cache.roles.states:
            cuts.add((sequence.length - 1) // self._page_size * self._page_size)
        return tuple(sorted(cut for cut in cuts if sequence.past < cut < sequence.length))

    def _share(self, sequences: Sequence[tuple[Seq, int]]) -> None:
        """After a step: full pages become the prefix cache's; boundaries that somebody may come back to are kept.

        `sequences` with how much each had cached before the step.
        """
        if self.cache is None:
            return
        named = [(s, s.names, before) for s, before in sequences if s.names is not None]
        size = self._page_size
        for s, names, before in named:
            if s.past // size > before // size and names.tokens < s.past:
                names.extend(s.tokens(names.tokens, s.past))
        rows, past = self._rows([s for s, _, _ in named]), _array([s.past for s, _, _ in named])
        self.placement.share(rows, past, [names for _, names, _ in named])
        for s, names, before in named:
            if before < len(s.prompt):  # a prefill chunk ended here, at a cut or not
                self.placement.keep(s.row, s.past, names)

    def _note_start(self, sequence: Seq, match: Match | None) -> None:
        receipt = sequence.request.receipt
        if match is not None and not receipt.restorable:
            receipt.cached_tokens = min(sequence.past, len(sequence.prompt))
            receipt.restorable = dict(match.per_kind)
            receipt.known_tokens = match.known * self._page_size
            receipt.cut_by = match.cut_by

    def _note_wait(self, sequence: Seq) -> None:
        """It is in for this step: what it waited is final, and for what it did when it last stood at the front."""
        assert sequence.queued is not None
        receipt, waited = sequence.request.receipt, self.clock() - sequence.queued
        receipt.waited_seconds += waited
        reason = sequence.waited_for or "queue"
        receipt.waited_for[reason] = receipt.waited_for.get(reason, 0.0) + waited
        sequence.queued, sequence.waited_for = None, None

    def _rows(self, sequences: Iterable[Seq]) -> Int64:
        return _array([s.row for s in sequences])

    def _vacate(self, sequences: list[Seq]) -> None:
        for sequence in sequences:
            if sequence.names is not None and sequence.past:
                self.placement.keep(sequence.row, sequence.past, sequence.names)
            sequence.request.receipt.take(self.placement.taken(sequence.row), self._page_bytes)
        self.placement.vacate([s.row for s in sequences])
        for sequence in sequences:
            sequence.row = -1

    def _finish(self, ended: list[tuple[Seq, FinishReason, int | str | None]]) -> None:
        if not ended:
            return
        self._vacate([s for s, _, _ in ended if s.status is Status.RUNNING])
        for sequence, reason, stop_reason in ended:
            assert sequence.status is not Status.FINISHED, "a sequence ends once"
            sequence.status, sequence.finish_reason, sequence.stop_reason = Status.FINISHED, reason, stop_reason
            self.counters.finished += 1
            if sequence.request.is_finished:
                del self.requests[sequence.request.request_id]
        self.running = [s for s in self.running if s.status is Status.RUNNING]
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


def _array(values: Iterable[int]) -> Int64:
    return np.array(list(values), np.int64)
