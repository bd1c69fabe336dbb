"""The engine: schedule, launch, settle.

    step():  schedule(n + 1)   launch(n + 1)   wait(n)   settle(n)   with an executor that overlaps
             schedule(n)       launch(n)       wait(n)   settle(n)   with one that does not

It joins a scheduler (which plans), an executor (which computes) and a tokenizer (which spells), and knows nothing
else of any of them. One thread calls it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.detokenize import Detokenizer, TextDecoder
from isthmus.engine.grammar import Follower, Grammars
from isthmus.engine.output import CompletionOutput, PromptLogprobs, RequestOutput, TokenLogprob
from isthmus.engine.sanitizer import Sanitizer
from isthmus.engine.scheduler import TOGETHER, Scheduler
from isthmus.engine.sequence import Request
from isthmus.engine.sequence import Sequence as Seq
from isthmus.engine.step import Executor, Launched, Result, Sampled, Step
from isthmus.errors import IsthmusError
from isthmus.memory import Pool
from isthmus.params import RequestError, SamplingParams

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Flight:
    """A step that was launched and whose results were not taken."""

    step: Step
    launched: Launched
    scores: list[PromptLogprobs]  # per span of the step: where its results go, whatever has become of the request


class Engine:
    """Serves requests from one pool.

    Args:
        pool: the arena's bookkeeping; the executor holds the arena.
        executor: runs the steps.
        tokenizer: of Transformers, or a `tokenizers.Tokenizer`.
        config: the scheduler's.
        max_model_len: prompt and output of a sequence never exceed it.
        vocab_size: token ids in prompts are below it.
        eos_token_ids: ids that end a sequence.
        max_cached_tokens: cap on what all sequences cache together; None: what the pool holds.
        prefix_caching: do not compute again what earlier requests left in the pool.
        page_size: see `Scheduler`.
        check_memory: "audit" or "full": find faults of memory, end those whom they concern, serve on (`Sanitizer`).
    """

    def __init__(
        self,
        pool: Pool,
        executor: Executor,
        tokenizer: Any,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        max_cached_tokens: int | None = None,
        prefix_caching: bool = False,
        page_size: int | None = None,
        check_memory: str = "off",
    ) -> None:
        self.pool = pool
        self.decoder = TextDecoder(tokenizer)
        self.scheduler = Scheduler(
            pool,
            config,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            max_cached_tokens=max_cached_tokens,
            prefix_caching=prefix_caching,
            page_size=page_size,
            # The sanitiser wants to see a page used when somebody gets it.
            together=TOGETHER if check_memory == "off" else 1,
        )
        self.sanitizer: Sanitizer | None = None
        if check_memory != "off":
            self.sanitizer = Sanitizer(executor, self.scheduler, full=check_memory == "full")
        self.executor: Executor = self.sanitizer or executor
        self.failure: BaseException | None = None  # what broke the executor; nothing is served after it
        self._faulty: list[RequestOutput] = []  # of requests that a fault of memory has ended, not reported
        self._flights: deque[_Flight] = deque()  # oldest first; empty between steps unless the executor overlaps
        self._vocab_size = vocab_size
        self._grammars = Grammars(tokenizer, vocab_size, sorted(eos_token_ids))
        self._followers: dict[Seq, Follower] = {}  # of sequences with a grammar that have not ended
        self._scores: dict[str, PromptLogprobs] = {}  # of requests that want them and have no output yet
        self._writers: dict[Seq, _Writer] = {}  # of sequences that have not ended

    @property
    def has_work(self) -> bool:
        """Is there a request that has not ended, a step whose results were not taken, or something to report?"""
        return self.scheduler.has_work or bool(self._flights) or bool(self._faulty)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
        at_end: bool = False,
    ) -> None:
        """Queue a request. RequestError, and nothing changed, if it can never be served.

        `prompt` is the text the ids came from; it is handed back in the outputs. Cached prefixes are shared with
        requests of the same `cache_salt` alone. `at_end`: outputs may come as late as each sequence's end, which spares
        the host all work on single tokens where stop strings, a grammar or log probabilities do not want it.
        """
        self._require_alive()
        self._require_ids("the prompt", prompt_token_ids)
        self._require_ids("logit_bias", params.logit_bias)
        self._require_ids("stop_token_ids", params.stop_token_ids)
        followers = [] if params.grammar is None else [self._grammars.follow(params.grammar) for _ in range(params.n)]
        at_end = at_end and not (params.stop or followers or params.logprobs is not None)
        request = Request(request_id, list(prompt_token_ids), params, cache_salt, prompt, at_end)
        self.scheduler.add(request)
        try:
            writers = {sequence: _Writer(self.decoder, sequence) for sequence in request.sequences}
        except BaseException:
            self.scheduler.abort(request_id)
            raise
        self._writers |= writers
        if params.prompt_logprobs is not None:
            self._scores[request_id] = [None] * len(prompt_token_ids)
        for sequence in request.sequences:
            if followers:
                sequence.mask = self._followers[sequence] = followers[sequence.index]

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no sequence is using."""
        self.scheduler.reset_prefix_cache()

    def step(self) -> list[RequestOutput]:
        """Launch one step and take the results of one. What they added, one output per request that gained a token and
        is told of it.

        With an executor that overlaps, the results are those of the step before, and none the first time.
        Whatever goes wrong in it is raised here, and the engine is dead from then on: pages on the device may be
        anywhere, and what was scheduled may be settled in part.
        """
        self._require_alive()
        try:
            step = self.scheduler.schedule()
            if step is not None:
                self._flights.append(self._launch(step))
                if self.executor.overlaps and len(self._flights) == 1:
                    return self._take_faulty()
            return self._take(self._flights.popleft()) if self._flights else self._take_faulty()
        except BaseException as error:
            self.failure = error
            self._flights.clear()  # nobody can say what came of them
            raise

    def drain(self) -> None:
        """Wait for steps that are still out when all requests have ended: then nothing uses the device's memory."""
        assert not self.scheduler.has_work, "requests are still being served: abort them first"
        while self._flights:
            self.step()

    def abort(self, request_id: str) -> bool:
        """End a request; its pages are free when this returns. False if there is no such request (any more)."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self.scheduler.abort(request_id)
        for sequence in request.sequences:
            self._writers.pop(sequence, None)
            self._followers.pop(sequence, None)
        self._scores.pop(request_id, None)
        self._audit()
        return True

    def _launch(self, step: Step) -> _Flight:
        if self._followers:
            for sample in step.samples:
                if sample.mask is not None:
                    sample.mask.prepare()
        flight = _Flight(step, self.executor.launch(step), [self._scores[span.request_id] for span in step.scores])
        self._end_faulty()
        return flight

    def _take(self, flight: _Flight) -> list[RequestOutput]:
        step, results = flight.step, flight.launched.wait()
        self._end_faulty()
        outputs = self._take_faulty()
        self._score(flight, results)
        outputs += self._settle(step, results[: len(step.samples)])
        self._audit()
        return outputs + self._take_faulty()

    def _settle(self, step: Step, sampled: Sequence[Result]) -> list[RequestOutput]:
        results: list[RequestOutput] = []
        of_many: dict[Request, RequestOutput] = {}  # of requests with more than one sequence
        ended: list[tuple[Request, RequestOutput]] = []
        for sequence, sample in self.scheduler.settle(step, sampled):
            request = sequence.request
            output = self._write(sequence, sample)
            result = of_many.get(request) if of_many else None
            if result is None:
                result = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, [output])
                result.num_cached_tokens = request.receipt.cached_tokens
                if self._scores:
                    result.prompt_logprobs = self._scores.pop(request.request_id, None)
                results.append(result)
                if len(request.sequences) > 1:
                    of_many[request] = result
            else:
                result.outputs.append(output)
            if output.finish_reason is not None:
                ended.append((request, result))
        for request, result in ended:
            if request.request_id not in self.scheduler.requests:
                result.finished, result.receipt = True, request.receipt
        return results

    def _audit(self) -> None:
        """Do the books balance? Whoever is at fault ends."""
        if self.sanitizer is not None:
            self.sanitizer.audit()
            self._end_faulty()

    def _end_faulty(self) -> None:
        """Sequences that the sanitiser has ended get their last output."""
        if self.sanitizer is None:
            return
        for sequence, problem in self.sanitizer.carry_out():
            request = sequence.request
            result = next((output for output in self._faulty if output.request_id == request.request_id), None)
            if result is None:
                result = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, [])
                result.num_cached_tokens = request.receipt.cached_tokens
                self._faulty.append(result)
            result.outputs.append(self._give_up(sequence, problem))
            self._scores.pop(request.request_id, None)
            if request.request_id not in self.scheduler.requests:
                result.finished, result.receipt = True, request.receipt

    def _take_faulty(self) -> list[RequestOutput]:
        """What they have to report."""
        outputs, self._faulty = self._faulty, []
        return outputs

    def _score(self, flight: _Flight, results: Sequence[Result]) -> None:
        """Keep the log probabilities of prompt tokens, which come behind the samples, until the request has output."""
        start = len(flight.step.samples)
        for span, entries in zip(flight.step.scores, flight.scores, strict=True):
            for i in range(len(span.targets)):
                scored = results[start + i]
                assert isinstance(scored, Sampled), "the executor left out the prompt logprobs that were asked for"
                entries[span.position + i] = _token_logprobs(self.decoder, scored)
            start += len(span.targets)

    def _write(self, sequence: Seq, sample: Result) -> CompletionOutput:
        """Spell a token, and end the sequence if that completes a stop string or its grammar."""
        if isinstance(sample, int):
            token = sample
        elif sample.problem is not None:
            return self._give_up(sequence, sample.problem)
        else:
            token = sample.token_id
        # The token that ends a sequence is no part of its text, unless asked for.
        hidden = sequence.finish_reason == "stop" and not sequence.request.params.include_stop_str_in_output
        if self._followers:
            self._follow(sequence, token)
        writer = self._writers[sequence]
        tokens = [*sequence.output] if sequence.request.at_end else [token]
        text, stop = writer.text.push(tokens[:-1] if hidden else tokens)
        if stop is not None and sequence.finish_reason is None:
            self.scheduler.finish([sequence], "stop", stop)
        elif sequence.finish_reason is not None:
            if stop is None:
                rest, stop = writer.text.finish()
                text += rest
            if stop is not None:
                sequence.finish_reason, sequence.stop_reason = "stop", stop
        output = CompletionOutput(sequence.index, text, tokens)
        if sequence.request.params.logprobs is not None:
            writer.score(output, sample)
        if sequence.finish_reason is not None:
            output.finish_reason, output.stop_reason = sequence.finish_reason, sequence.stop_reason
            del self._writers[sequence]
            self._followers.pop(sequence, None)
        return output

    def _give_up(self, sequence: Seq, problem: str) -> CompletionOutput:
        """The end of a sequence that got no token: what text was held back, and why."""
        _log.error("request %s ends without its next token: %s", sequence.request.request_id, problem)
        writer, tokens = self._writers.pop(sequence), [*sequence.output] if sequence.request.at_end else []
        text = writer.text.push(tokens)[0] + writer.text.finish()[0]
        self._followers.pop(sequence, None)
        return CompletionOutput(sequence.index, text, tokens, None, None, sequence.finish_reason, problem)

    def _follow(self, sequence: Seq, token_id: int) -> None:
        """Go on in the sequence's grammar, if it has one and goes on itself; end it where the grammar ends."""
        follower = self._followers.get(sequence)
        if follower is None or sequence.finish_reason is not None:
            return
        problem = follower.accept(token_id)
        if problem is not None:
            self.scheduler.finish([sequence], "abort", problem)
        elif follower.is_complete:
            self.scheduler.finish([sequence], "stop")

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise IsthmusError(f"the engine stopped after an error in a step ({self.failure!r}): build a new one")

    def _require_ids(self, what: str, token_ids: Collection[int]) -> None:
        strange = [token for token in token_ids if type(token) is not int]  # floats would pass the comparison
        if strange:
            raise RequestError(f"{what} has {strange[0]!r:.40} where a token id is due: give whole numbers (int)")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise RequestError(f"{what} has token id {bad}, outside the vocabulary (0 to {self._vocab_size - 1:,})")


class _Writer:
    """One sequence's text and logprobs as its tokens come."""

    __slots__ = ("_decoder", "_total", "text")

    def __init__(self, decoder: TextDecoder, sequence: Seq) -> None:
        params = sequence.request.params
        self._decoder = decoder
        self._total = 0.0  # log probability of all tokens so far
        self.text = Detokenizer(
            decoder,
            sequence.prompt,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def score(self, output: CompletionOutput, sample: Result) -> None:
        """Add the log probabilities of the newest token to the output that tells of it."""
        assert isinstance(sample, Sampled), "the executor left out the logprobs that were asked for"
        assert sample.logprob is not None
        self._total += sample.logprob
        output.cumulative_logprob = self._total
        output.logprobs = [_token_logprobs(self._decoder, sample)]


def _token_logprobs(decoder: TextDecoder, sampled: Sampled) -> dict[int, TokenLogprob]:
    assert sampled.logprob is not None
    assert sampled.rank is not None
    entries = [(sampled.token_id, sampled.logprob, sampled.rank)]
    entries += [(top.token_id, top.logprob, top.rank) for top in sampled.top if top.token_id != sampled.token_id]
    return {token: TokenLogprob(value, rank, decoder.decode([token])) for token, value, rank in entries}
