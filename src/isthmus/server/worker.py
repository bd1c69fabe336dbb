"""The engine process: take orders, run a step, report. `engine_process` starts it.

It ends when its standard input closes, so it never outlives the front, however that ended; Ctrl-C and SIGTERM are
the front's to handle, because requests that run may still be finished.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from isthmus.engine.wide_frame import wide_frame
from isthmus.errors import IsthmusError
from isthmus.params import RequestError
from isthmus.server import dashboard_view, wire
from isthmus.server.heap import Heap

if TYPE_CHECKING:
    from isthmus.engine.core import Engine
    from isthmus.engine.output import CompletionOutput, RequestOutput, TokenLogprob
    from isthmus.llm import LLM

IDLE_MS = 1000
"""Milliseconds without work after which free memory is given back; the next request may follow at once before that."""


def main() -> int:
    """Exit codes: 2 for a model or setting the user must change, 1 when anything else broke."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.Start)
    threading.Thread(target=_end_with_front, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)  # the front bounds what is in flight
    socket.connect(start.endpoint)
    try:
        service = _load(start)
        socket.send(wire.encode(service.info))
        service.serve(socket)
    except IsthmusError as error:
        socket.send(wire.encode(wire.Failed(str(error), by_user=True)))
        code = 2
    except Exception as error:
        traceback.print_exc()
        socket.send(wire.encode(wire.Failed(f"{type(error).__name__}: {error}".splitlines()[0], by_user=False)))
        code = 1
    socket.close(linger=5000)
    zmq.Context.instance().term()
    return code


def _end_with_front() -> None:
    """Wait until the front closes our input, which the operating system does for it if it is killed."""
    while os.read(0, 1):  # not through sys.stdin, whose lock a waiting reader would hold at our own end
        pass
    os._exit(0)


def _load(start: wire.Start) -> Service:
    from isthmus.llm import LLM  # noqa: PLC0415 (torch: only once the socket is there to report errors)

    args = dict(start.engine_args)
    if "static_workload" in args:
        args["static_workload"] = tuple(args["static_workload"])
    llm = LLM(**args)
    print(llm.certificate(), file=sys.stderr, flush=True)
    return Service(llm.engine, _model_info(llm, Path(start.folder)), llm.graph_bytes)


def _model_info(llm: LLM, folder: Path) -> wire.ModelInfo:
    tokenizer = llm.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise IsthmusError(f"{llm.name}: the server needs a fast tokenizer (tokenizer.json), and this model has none")
    file = folder / "tokenizer.json"
    file.write_text(backend.to_str())
    return wire.ModelInfo(
        name=llm.name,
        tokenizer_file=str(file),
        chat_template=tokenizer.chat_template,
        special_tokens={name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        end_token_ids=list(llm.end_token_ids),
        vocab_size=llm.layout.vocab_size,
        max_model_len=llm.engine.scheduler.max_model_len,
        max_num_seqs=llm.config.scheduler.max_num_seqs,
    )


class Service:
    """An engine that obeys a socket. `graph_bytes` is what its CUDA graphs take."""

    def __init__(self, engine: Engine, info: wire.ModelInfo, graph_bytes: int) -> None:
        self.engine = engine
        self.info = info
        self._graph_bytes = graph_bytes
        self._queued: deque[tuple[str, float]] = deque()  # requests that have not run yet, oldest first, and since when
        self._queue_seconds: dict[str, float] = {}  # of requests that ran and were not reported yet
        self._rejected: list[wire.Rejected] = []
        self._done: list[int] = []
        self._looked = False  # somebody wants to see what lies where
        self._heap = Heap()

    @wide_frame
    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Never returns: the process ends with the front, or with an error out of a step."""
        socket.send(wire.encode(self._report([])))
        while True:
            self._obey(socket)
            outputs = self.engine.step()
            self._note_started()
            socket.send(wire.encode(self._report(outputs)))
            self._heap.note_step()

    def _obey(self, socket: zmq.Socket[bytes]) -> None:
        """Carry out all orders that are there; wait for one while there is nothing else to do."""
        while self.engine.has_work or self._rejected or self._done or self._looked or self._wait(socket):
            try:
                message = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            was_busy = self.engine.has_work
            self._carry_out(wire.decode_to_engine(message))
            if was_busy and not self.engine.has_work:
                return  # the last request is gone: say so before waiting for more

    def _wait(self, socket: zmq.Socket[bytes]) -> bool:
        """Until there is an order."""
        if not socket.poll(IDLE_MS):
            self._heap.rest()
            socket.poll(None)
        return True

    def _carry_out(self, order: wire.ToEngine) -> None:
        if isinstance(order, wire.Abort):
            self.engine.abort(order.request_id)
            self._queue_seconds.pop(order.request_id, None)
        elif isinstance(order, wire.Reset):
            reset_prefix_cache(self.engine)
            self._done.append(order.call)
        elif isinstance(order, wire.Look):
            self._looked = True
        else:
            try:
                self.engine.add_request(
                    order.request_id, order.prompt_token_ids, order.params, cache_salt=order.cache_salt
                )
            except RequestError as error:
                self._rejected.append(wire.Rejected(order.request_id, str(error)))
            else:
                self._queued.append((order.request_id, time.monotonic()))

    def _note_started(self) -> None:
        """How long those that ran for the first time had waited. The oldest runs first: looking at the head will do."""
        requests = self.engine.scheduler.requests
        while self._queued:
            request_id, since = self._queued[0]
            request = requests.get(request_id)
            if request is not None and request.sequences[0].status.value == "waiting":
                return
            self._queued.popleft()
            self._queue_seconds[request_id] = time.monotonic() - since

    def _report(self, outputs: list[RequestOutput]) -> wire.Report:
        updates = [_update(output, self._queue_seconds.pop(output.request_id, None)) for output in outputs]
        rejected, self._rejected = self._rejected, []
        done, self._done = self._done, []
        view, self._looked = dashboard_view.view(self.engine) if self._looked else None, False
        return wire.Report(updates, rejected, done, stats(self.engine, self._graph_bytes), view)


def reset_prefix_cache(engine: Engine) -> None:
    """Forget cached prefixes that nobody is using."""
    engine.reset_prefix_cache()


def cached_pages(engine: Engine) -> Mapping[str, int]:
    """Pages per group that only the prefix cache holds; the pool counts them as live."""
    cache = engine.scheduler.cache
    return {} if cache is None else cache.idle


def evicted_pages(engine: Engine) -> Mapping[str, int]:
    """Pages per group that the prefix cache gave up, since the start."""
    cache = engine.scheduler.cache
    return {} if cache is None else cache.evicted


def stats(engine: Engine, graph_bytes: int) -> wire.Stats:
    """The engine now, in pages and bytes."""
    pool, scheduler = engine.pool, engine.scheduler
    usage, ids = pool.usage(cached_pages(engine)), pool.ids("tokens" if "tokens" in pool.spaces else "states")
    evicted = evicted_pages(engine)
    checked = engine.sanitizer
    groups = [
        wire.GroupStats(
            name=group.name,
            page_bytes=group.page_bytes,
            live_pages=group.live_pages,
            cached_pages=group.cached_pages,
            hole_pages=group.hole_pages,
            lo_byte=group.lo_byte,
            hi_byte=group.hi_byte,
            moved_pages=pool.moved_pages[group.name],
            evicted_pages=evicted.get(group.name, 0),
            table_entries=len(pool.table(group.name)),
        )
        for group in usage.groups.values()
    ]
    return wire.Stats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        total=usage.total,
        null=usage.null,
        gap=usage.gap,
        tail=usage.tail,
        groups=groups,
        ids=ids.live,
        id_capacity=ids.capacity,
        steps=scheduler.counters.steps,
        preemptions=scheduler.counters.preemptions,
        refusals=scheduler.counters.refusals,
        graph_bytes=graph_bytes,
        memory_faults={} if checked is None else dict(checked.faults),
        fenced_pages=0 if checked is None else sum(checked.fenced_pages.values()),
    )


def _update(output: RequestOutput, queue_seconds: float | None) -> wire.Update:
    prompt_logprobs = output.prompt_logprobs
    return wire.Update(
        output.request_id,
        [_piece(piece) for piece in output.outputs],
        output.finished,
        output.num_cached_tokens,
        queue_seconds,
        None
        if prompt_logprobs is None
        else [_scored(entry) if entry is not None else None for entry in prompt_logprobs],
        None if output.receipt is None else asdict(output.receipt),
    )


def _piece(output: CompletionOutput) -> wire.Piece:
    logprobs = None if output.logprobs is None else [_scored(entry) for entry in output.logprobs]
    return wire.Piece(output.index, output.text, output.token_ids, logprobs, output.finish_reason, output.stop_reason)


def _scored(entry: dict[int, TokenLogprob]) -> list[wire.Scored]:
    return [wire.Scored(token, x.logprob, x.rank, x.decoded_token) for token, x in entry.items()]


if __name__ == "__main__":
    sys.exit(main())
