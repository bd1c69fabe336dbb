"""Three kinds in one arena under churn: how much must be moved when a float is squeezed from both sides.

The scheduler, the pool and the placement are the real ones; the model is a fake that says the same token for ever. The
shape is Inkling's: 66 layers of which 11 attend to everything and 55 to a window of 512, each with four short
convolutions. States take the low end of the arena, windows float, full attention takes the high end:

    | states >>>      <<< windows >>>      <<< full |

The load swings between many short sequences, which grow the states, and few long ones, which grow the full group.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request
from isthmus.errors import ConfigError
from isthmus.memory import Delta, Group, LayerKV, Moves, Pool, Writes, kv_spec, state_spec
from isthmus.params import SamplingParams

LAYERS, PAGE, WINDOW = 66, 16, 512
FULL_HEADS, WINDOW_HEADS, HEAD_DIM, HIDDEN, CONV = 8, 16, 128, 6144, 4
ARENA = 16 << 30
SEQUENCES, BUDGET, QUEUE = 512, 8192, 64
PERIOD = 2000  # steps of one kind of load
SAMPLE = 100  # steps between two looks at the arena, with every check
SHORT, LONG = ((8, 48), (8, 32)), ((4_000, 24_000), (32, 256))  # tokens of prompt and output


def groups() -> list[Group]:
    """Inkling's layer groups in bfloat16, the convolutions in float32 (`InklingTextConfig` of Transformers 5.24)."""
    full = [layer for layer in range(LAYERS) if layer % 6 == 0]
    windows = [layer for layer in range(LAYERS) if layer % 6]
    parts = []
    for layer in range(LAYERS):
        keys = (FULL_HEADS if layer in full else WINDOW_HEADS) * HEAD_DIM
        for i, channels in enumerate((keys, keys, HIDDEN, HIDDEN)):  # of keys, values, attention and MLP
            parts.append((f"{layer}.conv{i}", (CONV - 1, channels), "float32"))
    return [
        Group("full", kv_spec([LayerKV(i, FULL_HEADS, HEAD_DIM, HEAD_DIM) for i in full], PAGE), "append"),
        Group(
            "window", kv_spec([LayerKV(i, WINDOW_HEADS, HEAD_DIM, HEAD_DIM) for i in windows], PAGE), "window", WINDOW
        ),
        Group("state", state_spec(parts), "state"),
    ]


def run(steps: int = 100_000, seed: int = 0, *, prefix_caching: bool = False) -> dict[str, Any]:
    """So many steps of the scheduler. ConfigError for fewer than one."""
    if steps < 1:
        raise ConfigError("--steps must be at least 1")
    squeeze = _Squeeze(ARENA, seed, prefix_caching)
    for _ in tqdm(range(steps), unit="step", disable=None):
        squeeze.step()
    squeeze.drain()
    return squeeze.result()


def lines(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{result['steps']:,} steps, {result['finished']:,} sequences, {result['computed_tokens']:,} tokens"
    yield f"{'allocated':<26}{result['allocated_bytes']:>22,} bytes"
    yield f"{'moved':<26}{result['moved_bytes']:>22,} bytes ({result['moved_per_allocated']:.4%})"
    yield f"{'steps that moved':<26}{result['steps_with_moves']:>22,}"
    for name in ("refusals", "preemptions", "evicted_pages", "checks"):
        yield f"{name.replace('_', ' '):<26}{result[name]:>22,}"
    yield f"{'group':<10}{'page bytes':>14}{'pages moved':>14}{'share of the arena: least':>28}{'mean':>9}{'most':>9}"
    for name, group in result["groups"].items():
        low, mean, high = (f"{group['share'][which]:.1%}" for which in ("least", "mean", "most"))
        yield f"{name:<10}{group['page_bytes']:>14,}{group['moved_pages']:>14,}{low:>28}{mean:>9}{high:>9}"
    for name in ("holes", "gap"):
        yield f"{'mean share of ' + name:<26}{result['mean_share'][name]:>22.2%}"
    for what, name in (("host", "host_us"), ("CPU", "host_cpu_us")):
        figures = result[name]
        by_load = ", ".join(f"{figures[load]} {load}" for load in ("short", "long"))
        yield f"{f'median {what} µs a step':<26}{figures['median']:>22,} ({by_load}; p99 {figures['p99']:,})"


class _Squeeze:
    """One scheduler under a closed loop of load."""

    def __init__(self, arena_bytes: int, seed: int, prefix_caching: bool) -> None:
        self._rng = Random(seed)
        self._pool = Pool(arena_bytes, groups())
        self._scheduler = Scheduler(
            self._pool,
            SchedulerConfig(SEQUENCES, BUDGET),
            max_model_len=LONG[0][1] + LONG[1][1],
            prefix_caching=prefix_caching,
        )
        self._caching = prefix_caching
        self._added = 0
        self._page_bytes = {name: group.spec.page_bytes for name, group in self._pool.groups.items()}
        self._allocated = dict.fromkeys(self._pool.groups, 0)  # pages
        self._steps_with_moves = 0
        self._micros: dict[str, list[float]] = {"short": [], "long": []}  # of each step
        self._cpu_micros: dict[str, list[float]] = {"short": [], "long": []}  # the same in CPU time
        self._samples: list[dict[str, Any]] = []

    def step(self) -> None:
        """Fill the queue, then one step; now and then a look at everything."""
        number = self._scheduler.counters.steps
        load = "long" if number // PERIOD % 2 else "short"
        while len(self._scheduler.waiting) < QUEUE:
            self._add(LONG if load == "long" else SHORT)
        start, cpu = time.perf_counter(), time.thread_time()
        delta = self._advance()
        self._cpu_micros[load].append((time.thread_time() - cpu) * 1e6)
        self._micros[load].append((time.perf_counter() - start) * 1e6)
        self._count(delta)
        if number % SAMPLE == 0:
            self._look(number, load)

    def drain(self) -> None:
        """End everybody: every byte must be free then."""
        for name in list(self._scheduler.requests):
            self._scheduler.abort(name)
        self._scheduler.reset_prefix_cache()
        self._pool.check()
        assert not any(region.live for region in self._pool.regions.values()), "pages are live after all have ended"

    def result(self) -> dict[str, Any]:
        """The figures, with the samples they come from."""
        counters, pool, cache = self._scheduler.counters, self._pool, self._scheduler.cache
        moved = sum(n * self._page_bytes[name] for name, n in pool.moved_pages.items())
        allocated = sum(n * self._page_bytes[name] for name, n in self._allocated.items())
        return {
            "steps": counters.steps,
            "finished": counters.finished,
            "computed_tokens": counters.computed_tokens,
            "allocated_bytes": allocated,
            "moved_bytes": moved,
            "moved_per_allocated": moved / allocated,
            "steps_with_moves": self._steps_with_moves,
            "refusals": counters.refusals,
            "preemptions": counters.preemptions,
            "evicted_pages": sum(cache.evicted.values()) if cache is not None else 0,
            "checks": len(self._samples),
            "groups": {name: self._group(name) for name in pool.groups},
            "mean_share": {what: self._mean(what) for what in ("holes", "gap")},
            "host_us": _summary(self._micros),
            "host_cpu_us": _summary(self._cpu_micros),
            "load": {
                "short": {"prompt": SHORT[0], "output": SHORT[1]}, "long": {"prompt": LONG[0], "output": LONG[1]},
                "steps_of_each": PERIOD, "queue": QUEUE, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": BUDGET,
                "arena_bytes": pool.arena_bytes, "page_size": PAGE, "window": WINDOW, "prefix_caching": self._caching,
            },
            "samples": self._samples,
        }  # fmt: skip

    def _add(self, tokens: tuple[tuple[int, int], tuple[int, int]]) -> None:
        prompt, output = (self._rng.randint(*between) for between in tokens)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        first = self._rng.randrange(1 << 30)
        self._scheduler.add(Request(str(self._added), list(range(first, first + prompt)), params))
        self._added += 1

    def _advance(self) -> Delta:
        step = self._scheduler.schedule()
        assert step is not None, "there is work, and no step"
        self._scheduler.settle(step, [1] * len(step.samples))
        return step.delta

    def _count(self, delta: Delta) -> None:
        moves = 0
        for op in delta.ops:
            if isinstance(op, Writes):
                self._allocated[op.group] += int(np.count_nonzero(op.physical))
            elif isinstance(op, Moves):
                moves += len(op.source)
                self._allocated[op.group] -= len(op.source)  # what moves is written to its table too
        self._steps_with_moves += moves > 0

    def _look(self, number: int, load: str) -> None:
        self._pool.check()
        usage = self._pool.usage(self._scheduler.placement.idle)
        usage.check()
        window = usage.groups["window"]
        self._samples.append(
            {
                "step": number,
                "load": load,
                "running": len(self._scheduler.running),
                "live": {name: group.live_bytes + group.cached_bytes for name, group in usage.groups.items()},
                "holes": sum(group.hole_bytes for group in usage.groups.values()),
                "gap": usage.gap,
                "float": [window.lo_byte, window.hi_byte],
                "moved_pages": dict(self._pool.moved_pages),
            }
        )

    def _group(self, name: str) -> dict[str, Any]:
        shares = [sample["live"][name] / self._pool.arena_bytes for sample in self._samples]
        return {
            "page_bytes": self._page_bytes[name],
            "moved_pages": self._pool.moved_pages[name],
            "allocated_pages": self._allocated[name],
            "share": {
                which: round(of(shares), 4) for which, of in (("least", min), ("mean", statistics.fmean), ("most", max))
            },
        }

    def _mean(self, what: str) -> float:
        return round(statistics.fmean(sample[what] for sample in self._samples) / self._pool.arena_bytes, 4)


def _summary(micros: dict[str, list[float]]) -> dict[str, float | None]:
    every = micros["short"] + micros["long"]
    return {
        "median": round(statistics.median(every), 1),
        "p99": round(float(np.percentile(every, 99)), 1),
        **{load: round(statistics.median(found), 1) if found else None for load, found in micros.items()},
    }
