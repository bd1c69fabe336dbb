"""How long the memory core takes per step: plan, commit, unbind and delta, the calls a scheduler makes.

Shapes of Gemma 3 270M at page size 16: full pages of 48 KiB, window pages of 240 KiB. No device is involved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isthmus.memory import Group, LayerKV, Plan, Pool, kv_spec

GIB = 2**30
SEQUENCES = 256
PAGE = 16
WINDOW = 512
PREFILL_PAGES = 8192 // PAGE


def run(samples: int = 300) -> dict[str, Any]:
    """Median and raw microseconds per step, for arenas of 1, 10 and 100 GB of bookkeeping."""
    by_arena = {f"{size}_gb": _measure(size * 10**9, samples) for size in (1, 10, 100)}
    result: dict[str, Any] = dict(by_arena["100_gb"])
    result["by_arena"] = {
        arena: {name: figure["median"] for name, figure in figures.items()} for arena, figures in by_arena.items()
    }
    result["shape"] = {
        "sequences": SEQUENCES, "page_size": PAGE, "window": WINDOW,
        "decode_step": "plan, commit and delta of 16 new pages in two groups, 16 window pages given back",
        "prefill": "plan, commit and delta of 512 pages in two groups", "arena_bytes": 100 * 10**9,
    }  # fmt: skip
    return result


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The medians as a table."""
    yield f"{'median microseconds':<28}" + "".join(f"{arena.replace('_', ' '):>10}" for arena in result["by_arena"])
    for name in next(iter(result["by_arena"].values())):
        row = "".join(f"{figures[name]:>10.1f}" for figures in result["by_arena"].values())
        yield f"{name.removesuffix('_us').replace('_', ' '):<28}{row}"


def _measure(arena_bytes: int, samples: int) -> dict[str, Any]:
    return {
        "decode_step_us": _summary(_decode_steps(_pool(arena_bytes), samples)),
        "prefill_us": _summary(_prefills(_pool(arena_bytes), samples, scattered=False)),
        "prefill_into_holes_us": _summary(_prefills(_pool(arena_bytes), samples, scattered=True)),
        "compacting_step_us": _summary(_compacting_steps(_pool(arena_bytes), samples)),
    }


def _pool(arena_bytes: int) -> Pool:
    full = kv_spec([LayerKV(i, 1, 256, 256) for i in (5, 11, 17)], PAGE)
    window = kv_spec([LayerKV(i, 1, 256, 256) for i in range(18) if i not in (5, 11, 17)], PAGE)
    return Pool(arena_bytes, [Group("full", full, "append"), Group("window", window, "window", WINDOW)])


def _grant(pool: Pool, full: int, window: int) -> np.ndarray[Any, Any]:
    plan = pool.plan({"full": full, "window": window})
    assert isinstance(plan, Plan), plan.message
    ids = plan.ids["tokens"]
    pool.commit(plan, {"window": ids[full - window :]})
    pool.take_delta()
    return ids


def _decode_steps(pool: Pool, samples: int) -> list[float]:
    """256 sequences of a full window each; a step gives 16 of them a page and takes their oldest window page."""
    share = min(WINDOW // PAGE, pool.num_pages("window") * 3 // 4 // SEQUENCES)
    held = [_grant(pool, share, share) for _ in range(SEQUENCES)]
    oldest = np.concatenate(np.stack(held, axis=1))  # page by page across the sequences, as time would have it

    def step(i: int) -> None:
        passed = oldest[i * 16 : i * 16 + 16]
        _grant(pool, 16, 16)
        pool.unbind("window", passed)

    count = min(samples, len(oldest) // 16)
    return _time(step, count)


def _prefills(pool: Pool, samples: int, *, scattered: bool) -> list[float]:
    """A prompt of 8,192 tokens into fresh bytes, or into holes that other sequences left all over."""
    if scattered:
        held = np.concatenate([_grant(pool, 64, 64) for _ in range(min(64, pool.num_pages("window") // 100))])
        pool.release("tokens", held[::2])
        pool.take_delta()
    pages = min(PREFILL_PAGES, pool.num_pages("window") // 4)

    times: list[float] = []
    for _ in range(samples):
        start = time.perf_counter()
        ids = _grant(pool, pages, pages)
        times.append((time.perf_counter() - start) * 1e6)
        pool.release("tokens", ids)
        pool.take_delta()
    return times


def _compacting_steps(pool: Pool, samples: int) -> list[float]:
    """A full arena with holes: each step's 16 pages are made room for by moving pages of the other group."""
    while isinstance(plan := pool.plan({"full": 512, "window": 256}), Plan):
        pool.commit(plan, {"window": plan.ids["tokens"][:256]})
    while isinstance(plan := pool.plan({"full": 1}), Plan):
        pool.commit(plan)
    live = pool.ids("tokens").live_ids()
    pool.unbind("window", live[pool.is_bound("window", live)][::7])
    pool.take_delta()

    def step(_: int) -> None:
        _grant(pool, 16, 0)

    return _time(step, min(samples, len(pool.regions["window"].holes) * 4 // 16))


def _time(step: Callable[[int], None], samples: int) -> list[float]:
    times: list[float] = []
    for i in range(samples):
        start = time.perf_counter()
        step(i)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _summary(samples: list[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(samples), 1), "samples": [round(s, 1) for s in samples]}
