"""All of a workload: traces, how fast they play, and whether they take turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.sim.arrivals import Arrival, alternate, before, merged


@dataclass(frozen=True)
class Workload:
    """Traces at the rate they are played, the first request of each at 0."""

    names: tuple[str, ...]  # of the traces
    traces: tuple[tuple[Arrival, ...], ...]
    period: float | None = None  # seconds of a turn; None: all play at once
    duration: float | None = None  # nothing arrives later; None: to the end of the traces

    def arrivals(self) -> list[Arrival]:
        """Everything, in the order of time."""
        found = merged(self.traces) if self.period is None else alternate(self.traces, self.period)
        return found if self.duration is None else before(found, self.duration)

    def only(self, trace: int) -> Workload:
        """One of the traces, as far as it plays here."""
        mine = [arrival for arrival in self.arrivals() if arrival.trace == trace]
        part = self.traces[trace][: len(mine)]
        return Workload((self.names[trace],), (part,))

    def sample(self, requests: int) -> Workload:
        """About so many requests of its start, evenly of all traces; where they take turns, at least two of each.

        The workload itself if it has no more.
        """
        if requests >= len(self.arrivals()):
            return self
        share = -(-requests // len(self.traces))
        played = [0] * len(self.traces)
        for arrival in self.arrivals():
            played[arrival.trace - self._first] += 1
        traces = tuple(trace[: min(share, n)] for trace, n in zip(self.traces, played, strict=True))
        if self.period is None:
            return dataclasses.replace(self, traces=traces, duration=None)
        spans = [trace[-1].at for trace in traces if trace]
        period = min([self.period, *(span / 2 for span in spans if span > 0)])
        return dataclasses.replace(self, traces=traces, period=period, duration=None)

    @property
    def _first(self) -> int:
        return next((trace[0].trace for trace in self.traces if trace), 0)


def phases(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Each trace by itself, with its name; none if there is one alone."""
    if len(workload.traces) > 1:
        yield from ((name, workload.only(i)) for i, name in enumerate(workload.names))


def counted(arrivals: Sequence[Arrival]) -> tuple[int, int, int]:
    """Requests, prompt tokens and output tokens."""
    return len(arrivals), sum(a.input for a in arrivals), sum(a.output for a in arrivals)
