"""Prometheus metrics under the names that dashboards for such servers know, with the prefix `isthmus:`.

Latencies and tokens are counted in the front, which sees what clients see; the arena comes from the engine's newest
report, so `pool_bytes` always sums to the arena.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from isthmus.server.call import Call, Times
from isthmus.server.wire import Stats, Update

_PREFIX = "isthmus:"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_SLOW = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)


class Metrics:
    """What the front counts. `stats` gives the engine's newest report when a scrape comes."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self.registry = CollectorRegistry()
        self._refusals: Counts[str] = Counts()
        self.registry.register(_EngineCollector(stats, self._refusals))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got a first token")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._cache_cuts = counter(
            "prefix_cache_cuts", "Hits cut below what is known, by what could not restore", "group"
        )
        self._waited = counter("request_wait_seconds", "Time in the queue, by what it was waited for", "reason")
        self._success = counter("request_success", "Continuations that ended, by why", "finished_reason")
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", _FAST)
        self._inter_token = histogram("inter_token_latency_seconds", "Between tokens of a continuation", _FAST)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token", _SLOW)
        self._queue = histogram("request_queue_time_seconds", "From arrival in the engine to the first step", _SLOW)

    def update(self, call: Call, update: Update, now: float) -> None:
        """The engine added something to a call. Called before the call takes it in."""
        times = call.times
        if times.first is None:
            times.first = now
            self._first_token.observe(now - times.arrival)
            self._prompt_tokens.inc(call.prompt_tokens)
            self._cache_queries.inc(call.prompt_tokens)
        if update.queue_seconds is not None:
            self._queue.observe(update.queue_seconds)
            self._cache_hits.inc(update.cached_tokens)
        if update.receipt is not None:
            self._receipt(update.receipt)
        for piece in update.pieces:
            self._generation_tokens.inc(len(piece.token_ids))
            if piece.token_ids:
                self._token(times, (update.request_id, piece.index), now)
            if piece.finish_reason is not None:
                self._success.labels(piece.finish_reason).inc()
        times.last = now

    def _token(self, times: Times, continuation: tuple[str, int], now: float) -> None:
        """A continuation gained a token."""
        before = times.tokens.get(continuation)
        if before is not None:
            self._inter_token.observe(now - before)
        times.tokens[continuation] = now

    def _receipt(self, receipt: Mapping[str, Any]) -> None:
        if receipt["cut_by"] is not None:
            self._cache_cuts.labels(receipt["cut_by"]).inc()
        for reason, seconds in receipt["waited_for"].items():
            self._waited.labels(reason).inc(seconds)

    def close(self, call: Call) -> None:
        """The front is done with a call."""
        if call.error is None and not call.unfinished and call.times.last is not None:
            self._e2e.observe(call.times.last - call.times.arrival)
        else:
            self._success.labels("abort" if call.error is None else "error").inc()

    def refuse(self, reason: str) -> None:
        """A request was turned away."""
        self._refusals[reason] += 1

    def totals(self) -> dict[str, float]:
        """Tokens since the start, by the names of their counters."""
        counters = {
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generation_tokens,
            "prefix_cache_queries": self._cache_queries,
            "prefix_cache_hits": self._cache_hits,
        }
        return {name: next(iter(counter.collect())).samples[0].value for name, counter in counters.items()}

    def refusals(self) -> dict[str, int]:
        """Requests turned away since the start, by why."""
        return dict(self._refusals)

    def render(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's newest report at every scrape; nothing while there is no engine."""

    def __init__(self, stats: Callable[[], Stats | None], refusals: Counts[str]) -> None:
        self._stats = stats
        self._refusals = refusals  # of requests, by the front

    def describe(self) -> list[Metric]:
        return []  # names depend on no state, and none is taken twice

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        refusals = CounterMetricFamily(_PREFIX + "refusals", "Requests and plans refused, by why", labels=["reason"])
        for reason, count in self._refusals.items():
            refusals.add_metric([reason], count)
        if stats is not None:
            refusals.add_metric(["pool_full"], stats.refusals)
            yield from self._engine(stats)
        yield refusals

    def _engine(self, stats: Stats) -> Iterator[Metric]:
        used = sum(group.page_bytes * (group.live_pages + group.cached_pages) for group in stats.groups)
        yield _gauge("num_requests_running", "Continuations that have pages", stats.running)
        yield _gauge("num_requests_waiting", "Continuations that wait for pages", stats.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the arena that is live or cached", used / stats.total)
        yield _counter("engine_steps", "Forwards since the engine's start", stats.steps)
        yield _counter("num_preemptions", "Continuations that gave back their pages to older ones", stats.preemptions)
        yield _gauge("graph_bytes", "What CUDA graphs take of the device, beside the arena", stats.graph_bytes)
        moved = sum(group.moved_pages * group.page_bytes for group in stats.groups)
        yield _counter("moved_bytes", "Bytes of pages moved to make room", moved)
        evicted = CounterMetricFamily(_PREFIX + "evicted_pages", "Cached pages given up", labels=["group"])
        for group in stats.groups:
            evicted.add_metric([group.name], group.evicted_pages)
        yield evicted
        faults = CounterMetricFamily(
            _PREFIX + "memory_faults", "Faults of memory that --check-memory found", labels=["kind"]
        )
        for kind, count in stats.memory_faults.items():
            faults.add_metric([kind], count)
        yield faults
        yield _gauge("fenced_pages", "Pages that nobody gets any more after a fault of memory", stats.fenced_pages)
        yield _pool_bytes(stats)


def pool_bytes(stats: Stats) -> dict[tuple[str, str], int]:
    """Bytes by (group, state); they sum to the arena. What is no group's has an empty group."""
    parts = {("", "gap"): stats.gap, ("", "null"): stats.null, ("", "tail"): stats.tail}
    for group in stats.groups:
        pages = {"live": group.live_pages, "cached": group.cached_pages, "hole": group.hole_pages}
        parts |= {(group.name, state): n * group.page_bytes for state, n in pages.items()}
    assert sum(parts.values()) == stats.total, "the parts of the arena do not sum to it"
    return parts


def _pool_bytes(stats: Stats) -> Metric:
    metric = GaugeMetricFamily(_PREFIX + "pool_bytes", "The arena; all of it, always", labels=["group", "state"])
    for labels, value in pool_bytes(stats).items():
        metric.add_metric(list(labels), value)
    return metric


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)
