"""The command `bench fuzz`: deterministic simulation testing, world after world, seed after seed.

explore -> (a failure) -> shrink -> a script that a person can read, and the seed that finds it again
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from tqdm import tqdm

from isthmus.errors import ConfigError
from isthmus.sim.fuzz_run import Run, explore
from isthmus.sim.fuzz_shrink import shrink

_WORLDS = 1000


def run(worlds: int | None = None, seed: int | None = None, minutes: float | None = None) -> dict[str, Any]:
    """Run worlds until there have been enough, time is up, or Ctrl-C. What was done is in the result in any case.

    Args:
        worlds: None: 1,000; 1 with a seed; no limit with minutes.
        seed: of the first, the others follow; None: 0.
        minutes: no world begins after so long.
    """
    if not __debug__:
        raise ConfigError("bench fuzz checks by assertions, which python -O leaves out: run it without -O")
    if (worlds is not None and worlds < 1) or (minutes is not None and not minutes > 0):
        raise ConfigError("--worlds must be at least 1 and --minutes more than 0")
    if worlds is None and minutes is None:
        worlds = _WORLDS if seed is None else 1
    first, start = seed or 0, time.monotonic()
    until = None if minutes is None else start + 60 * minutes
    reached: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    done, interrupted, number = 0, False, first
    try:
        with tqdm(total=worlds, unit="world", disable=None) as progress:
            for number in count(first):
                if done == worlds or (until is not None and time.monotonic() > until):
                    break
                found = explore(number)
                reached += found.seen
                if found.failure is not None:
                    _report(failures, number, found)
                done += 1
                progress.update()
                progress.set_postfix(failed=len(failures))
    except KeyboardInterrupt:
        interrupted = True
    return {
        "seed": first,
        "worlds": done,
        "seconds": round(time.monotonic() - start, 1),
        "interrupted": interrupted,
        "interrupted_seed": number if interrupted else None,  # the world that was under way
        "reached": dict(sorted(reached.items())),
        "failures": failures,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """What was reached, then every failure with its script."""
    for failure in result["failures"]:
        yield f"seed {failure['seed']}: {failure['kind']}: {failure['message']}"
        if failure["runs_to_shrink"]:
            yield from (f"  {line}" for line in failure["script"])
        yield f"  again: {failure['command']}"
    for what, n in result["reached"].items():
        yield f"{what:<32}{n:>14,}"
    end = f", interrupted in seed {result['interrupted_seed']}" if result["interrupted"] else ""
    bad = len(result["failures"])
    yield f"{result['worlds']:,} worlds from seed {result['seed']} in {result['seconds']:,} s{end}: {bad} failed"


def _report(failures: list[dict[str, Any]], seed: int, found: Run) -> None:
    """Add a failure, then make it small if it is the first of its kind."""
    assert found.failure is not None
    known = {failure["kind"] for failure in failures}
    failures.append(_told(seed, found, len(found.events), 0))
    if found.failure.kind not in known:
        print(f"seed {seed}: {found.failure.kind}: {found.failure.message}: shrinking", file=sys.stderr)
        small, runs = shrink(found)
        failures[-1] = _told(seed, small, len(found.events), runs)


def _told(seed: int, found: Run, events: int, runs: int) -> dict[str, Any]:
    assert found.failure is not None
    return {
        "seed": seed,
        "kind": found.failure.kind,
        "message": found.failure.message,
        "events_drawn": events,
        "events": len(found.events),
        "runs_to_shrink": runs,
        "script": found.lines(),
        "command": f"isthmus bench fuzz --seed {seed}",
    }
