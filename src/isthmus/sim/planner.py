"""The engine's scheduler, and two things that only a simulation wants of it.

- Steps in which nothing but lengths changes are taken many at once (`coast`): everybody decodes, nobody waits, no page
  is filled, gained or passed by a window, nobody ends. The result is that of taking them one by one, bit for bit.
- Snapshots of states at fixed intervals instead of where the engine takes them (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from isthmus.cache import kind_of
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.rows import Int64
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.step import Step
from isthmus.errors import ConfigError
from isthmus.memory import Pool
from isthmus.sim.snapshots import IntervalRows, IntervalSharing

Float64 = NDArray[np.float64]


class Planner(Scheduler):
    """A scheduler in virtual time. Steps do not overlap.

    Args:
        page_size: see `Scheduler`.
        snapshots: save states at multiples of so many tokens; None: where the engine does.
        output_token: what every sequence generates.
    """

    def __init__(
        self,
        pool: Pool,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        prefix_caching: bool,
        clock: Callable[[], float],
        page_size: int | None = None,
        snapshots: int | None = None,
        output_token: int = 0,
    ) -> None:
        super().__init__(
            pool,
            config,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
            page_size=page_size,
            together=1,  # steps that are coasted are none of those that would count
            clock=clock,
        )
        self._output_token = output_token
        self._windows = [kind_of(g, keep_boundary=prefix_caching) for g in pool.groups.values() if g.kind == "window"]
        self._settled: object = None  # what the pool looked like when the last step was committed
        if snapshots is None:
            return
        if self.cache is None or not self.cache.roles.states:
            raise ConfigError("--snapshots needs a model with states and the prefix cache: there is nothing to save")
        if snapshots < 1 or snapshots % self._page_size:
            raise ConfigError(f"--snapshots {snapshots} is not a multiple of the page size, {self._page_size}")
        self._sharing = IntervalSharing(self.cache, self.placement, snapshots)
        self.running.at = IntervalRows(config.max_num_seqs, snapshots)

    def schedule(self) -> Step | None:
        """As the engine's; notes how it leaves the pool."""
        step = super().schedule()
        self._settled = self._traces()
        return step

    def coast(self, now: float, until: float, seconds: Callable[[Int64], Float64]) -> Float64:
        """Take the steps that change nothing but lengths, as many as there are now and start before `until`.

        Args:
            now: when the first of them starts, before `until`.
            seconds: how long steps take in which sequences with `past` [steps, sequences] cached tokens decode.

        Returns when each of them ends: [steps], maybe none.
        """
        most = self._idle_steps() if not self.waiting and self.running else 0
        if not most:
            return np.zeros(0)
        rows, at = self.running.rows, self.running.at
        past = at.past[rows] + np.arange(most)[:, None]
        times = np.cumsum(np.concatenate(([now], seconds(past))))
        steps = int(np.count_nonzero(times[:-1] < until))
        tokens = [self._output_token] * steps
        for sequence in self.running:
            sequence.output.extend(tokens)
        at.went_on(rows, steps)
        self.counters.steps += steps
        self.counters.generation_tokens += steps * len(rows)
        self.counters.computed_tokens += steps * len(rows)
        return times[1 : steps + 1]

    def _idle_steps(self) -> int:
        """So many steps change nothing but lengths, at least."""
        rows, at = self.running.rows, self.running.at
        past = at.past[rows]
        most = int((-past % self._page_size).min()) - 1
        if most < 1:
            return 0
        decoding = (at.length[rows] - past == 1) & (past >= at.prompt[rows]) & at.begun[rows]
        most = min(most, int((at.most_cached[rows] - past).min()) - 1)
        if most < 1 or not decoding.all():
            return 0
        # A step begins with these two. If they do anything, it is not idle.
        self._share_full()
        self.placement.unbind_passed(rows, past)
        if self._traces() != self._settled:
            return 0
        while most and any((kind.dead(past + most - 1) > kind.dead(past)).any() for kind in self._windows):
            most //= 2
        return most

    def _traces(self) -> object:
        """Differs when anything was done to the pool in between: pages came or went, or somebody left."""
        pages = [(region.live, len(region.holes)) for region in self.pool.regions.values()]
        return pages, self.counters.finished, self.counters.preemptions
