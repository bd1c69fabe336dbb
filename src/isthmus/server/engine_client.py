"""The engine as the front sees it: submit calls, hear what came of them, and start it again when it dies.

    starting -> ready -> restarting -> ready ...      stopped at the end

When the process ends, every call that was running fails at once with one clear error; a new process is started after
a pause that doubles while it keeps dying.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import ConfigError, IsthmusError
from isthmus.server import wire
from isthmus.server.call import Call, Job
from isthmus.server.engine_process import EngineProcess
from isthmus.server.errors import ApiError
from isthmus.server.metrics import Metrics

logger = logging.getLogger("isthmus.server")

FIRST_PAUSE = 0.25  # seconds before the first restart
LONGEST_PAUSE = 30.0
STEADY = 60.0  # seconds of life after which a death counts as the first again


class EngineError(IsthmusError):
    """The engine process ended before it was ready."""


@dataclass(frozen=True)
class Ended:
    """A request that ended by itself."""

    request_id: str
    output_tokens: int
    receipt: Mapping[str, Any]


class EngineClient:
    """Supervises the engine process and multiplexes calls over its socket.

    Args:
        engine_args: settings for `LLM`.
        max_queue: continuations that may be without a first token at one time.
        request_timeout: seconds a call may take.
    """

    def __init__(
        self, engine_args: dict[str, Any], metrics: Metrics, *, max_queue: int, request_timeout: float
    ) -> None:
        self.state = "starting"
        self.info: wire.ModelInfo | None = None
        self.stats: wire.Stats | None = None
        self.restarts = 0
        self._args = engine_args
        self._metrics = metrics
        self._max_queue = max_queue
        self._timeout = request_timeout
        self._process: EngineProcess | None = None
        self._calls: dict[str, tuple[Call, int]] = {}  # by the engine's request id: the call and which of its prompts
        self._open: set[Call] = set()
        self._deadlines: dict[Call, asyncio.TimerHandle] = {}
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._reset_names = itertools.count()
        self._first_token_seconds = 1.0  # of the newest call that got one
        self.viewed: tuple[wire.Stats, wire.View] | None = None  # of one report; None while there is no engine
        self.ended: deque[Ended] = deque(maxlen=16)  # newest last
        self._reports = 0  # heard
        self._viewed_at = -1  # the report that `viewed` came with
        self._look: asyncio.Future[None] | None = None  # done when the engine has answered, or is gone

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def in_flight(self) -> int:
        """Calls that are open."""
        return len(self._open)

    async def supervise(self, ready: asyncio.Future[wire.ModelInfo]) -> None:
        """Keep an engine process running until cancelled.

        `ready` gets what the first one says of the model, or EngineError / ConfigError when it never got that far;
        then nothing is retried.
        """
        pause = FIRST_PAUSE
        try:
            while True:
                started = time.monotonic()
                reason = await self._live(ready)
                if not ready.done():
                    ready.set_exception(reason)
                    return
                if time.monotonic() - started > STEADY:
                    pause = FIRST_PAUSE
                logger.error("%s; starting it again in %.2f s", reason, pause)
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)
                self.restarts += 1
        finally:
            self.state = "stopped"
            self._fail_all("the server is shutting down")

    async def _live(self, ready: asyncio.Future[wire.ModelInfo]) -> IsthmusError:
        """One life of the process; how it ended."""
        async with EngineProcess(self._args) as process:
            failed: wire.Failed | None = None
            while (message := await process.receive()) is not None:
                if isinstance(message, wire.Failed):
                    failed = message
                elif isinstance(message, wire.ModelInfo):
                    self.info = message
                else:
                    self._hear(message)
                    if self.state != "ready":  # the first report: there is an arena to tell of
                        self._be_ready(process, ready)
            self.state, self._process = "restarting", None
            end = process.ending
        if failed is not None and failed.by_user:
            reason: IsthmusError = ConfigError(failed.message)
        else:
            detail = "" if failed is None else f" after an error ({failed.message})"
            reason = EngineError(f"the engine process {end}{detail}")
        self.stats = None
        self._see(None)
        self._fail_all(f"{reason} while serving this request; it is being started again: send the request once more")
        return reason

    def _be_ready(self, process: EngineProcess, ready: asyncio.Future[wire.ModelInfo]) -> None:
        assert self.info is not None, "an engine tells its model before it reports"
        self._process, self.state = process, "ready"
        if not ready.done():
            ready.set_result(self.info)

    # -- calls ----------------------------------------------------------------------------------------------

    def require_ready(self) -> wire.ModelInfo:
        """What is known of the model. ApiError 503 while there is no engine."""
        if self.state != "ready" or self.info is None:
            raise ApiError(503, f"the engine is {self.state}: try again soon", code="not_ready", retry_after=2)
        return self.info

    def submit(self, call_id: str, jobs: Sequence[Job]) -> Call:
        """Hand prompts to the engine. ApiError 503 without an engine, 429 while the queue is full."""
        self.require_ready()
        assert self._process is not None
        new = len(jobs) * jobs[0].params.n
        waiting = sum(call.unstarted for call in self._open)
        if waiting + new > self._max_queue:
            self._metrics.refuse("queue_full")
            raise ApiError(
                429,
                f"{waiting:,} continuations wait for their first token, this request asks for {new:,}, and --max-queue "
                f"is {self._max_queue:,}: try again later",
                code="queue_full",
                retry_after=min(60.0, self._first_token_seconds),
            )
        call = Call(call_id, list(jobs), self._close)
        self._open.add(call)
        self._deadlines[call] = asyncio.get_running_loop().call_later(self._timeout, self._expire, call)
        for prompt, job in enumerate(jobs):
            self._calls[call.request_id(prompt)] = (call, prompt)
            self._process.send(wire.Submit(call.request_id(prompt), job.prompt_token_ids, job.params, job.cache_salt))
        return call

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; done when this returns. ApiError 503 without an engine."""
        self.require_ready()
        assert self._process is not None
        name = next(self._reset_names)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets[name] = done
        self._process.send(wire.Reset(name))
        await done

    async def look(self, patience: float) -> None:
        """Bring `viewed` up to date, for so many seconds at most. Asks nothing of an engine that reported nothing."""
        if self.state != "ready" or self._process is None or self._viewed_at == self._reports:
            return
        if self._look is None:
            self._look = asyncio.get_running_loop().create_future()
            self._process.send(wire.Look())
        await asyncio.wait([self._look], timeout=patience)

    def stop_calls(self) -> None:
        """Fail everything that still runs: the time to drain is over."""
        for call in list(self._open):
            self._drop(call, ApiError(503, "the server is shutting down and the time to drain is over"))

    def _close(self, call: Call) -> None:
        """The front is done with a call, finished or not."""
        self._abort(call)
        self._open.discard(call)
        self._deadlines.pop(call).cancel()
        self._metrics.close(call)

    def _expire(self, call: Call) -> None:
        self._drop(call, ApiError(408, f"not finished after --request-timeout ({self._timeout:g} s)", code="timeout"))

    def _drop(self, call: Call, error: ApiError) -> None:
        self._abort(call)
        call.fail(error)

    def _abort(self, call: Call) -> None:
        for request_id in call.request_ids():
            if self._calls.pop(request_id, None) is not None and self._process is not None:
                self._process.send(wire.Abort(request_id))

    def _fail_all(self, message: str) -> None:
        for call in {call for call, _ in self._calls.values()}:
            call.fail(ApiError(503, message, code="engine_died", retry_after=2))
        self._calls.clear()
        for future in self._resets.values():
            if not future.done():
                future.set_exception(ApiError(503, message, code="engine_died", retry_after=2))
        self._resets.clear()

    # -- news -----------------------------------------------------------------------------------------------

    def _hear(self, report: wire.Report) -> None:
        now = time.monotonic()
        self.stats = report.stats
        self._reports += 1
        if report.view is not None:
            self._see((report.stats, report.view))
        for update in report.updates:
            found = self._calls.get(update.request_id)
            if found is None:
                continue  # aborted, and the engine did not know yet
            call, prompt = found
            if update.finished:
                del self._calls[update.request_id]
            self._metrics.update(call, update, now)
            if call.times.first == now:
                self._first_token_seconds = now - call.times.arrival
            call.push(prompt, update)
            if update.receipt is not None:
                self.ended.append(Ended(update.request_id, call.generated[prompt], update.receipt))
        for rejected in report.rejected:
            found = self._calls.pop(rejected.request_id, None)
            if found is not None:
                self._metrics.refuse("impossible")
                self._drop(found[0], ApiError(400, rejected.message, param="prompt"))
        for name in report.done:
            future = self._resets.pop(name, None)
            if future is not None and not future.done():
                future.set_result(None)

    def _see(self, viewed: tuple[wire.Stats, wire.View] | None) -> None:
        self.viewed, self._viewed_at = viewed, -1 if viewed is None else self._reports
        if self._look is not None and not self._look.done():
            self._look.set_result(None)
        self._look = None
