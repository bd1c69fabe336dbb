"""What a GPU did, by kernel: a trace of torch's profiler, its kernels sorted into classes by their names."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CLASSES = {
    "attention": r"decode_kernel|prefill_kernel|attention|attend|flash|fmha|merge_kernel",
    "states": r"_(delta|conv|conv_\w+|ssd|scan|rglru|chunks|solve|walk)_kernel",
    "cache writes": r"write_kernel|write_kv",
    "routing": r"_(count|plan|place|top_k)_kernel",
    "tables and moves": r"^_?(translate|scatter|copy|fill)_kernel",
    "sampling": r"argmax|survey|greedy|choose|edit_kernel|rank_kernel|score_kernel|softmax|sort|topk|radix|multinomial",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|triton_tem|triton_mm|linear|dot_kernel",
    "elementwise and norms": r"^triton_|elementwise|reduce_kernel|norm|gather|index|embedding|cat|silu|gelu|rotary",
}
"""Patterns of kernel names, case ignored; the first that matches is the class, "other" if none does."""

_FUSED = "triton_(poi|per|red)_"
"""Kernels of Inductor, whatever is in their names: what they are fused from, and between which opaque operators."""

_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """Something a GPU did, in microseconds."""

    name: str
    start: float
    duration: float


@dataclass
class Trace:
    """What was traced; complete when the block of `traced` has ended."""

    events: list[Event] = field(default_factory=list)

    @property
    def busy_us(self) -> float:
        """Microseconds in which anything ran."""
        return sum(us for _, us in self._own())

    def by_class(self) -> dict[str, float]:
        """Microseconds of each class, in the order of `CLASSES`; they add up to `busy_us`."""
        total = dict.fromkeys((*CLASSES, "other"), 0.0)
        for name, us in self._own():
            total[class_of(name)] += us
        return total

    def top(self, count: int) -> list[dict[str, Any]]:
        """The kernels that took longest in all: name, class, calls, microseconds."""
        of_name: dict[str, list[float]] = defaultdict(list)
        for name, us in self._own():
            of_name[name].append(us)
        longest = sorted(of_name.items(), key=lambda item: -sum(item[1]))[:count]
        return [
            {"name": name[:200], "class": class_of(name), "calls": len(times), "us": sum(times)}
            for name, times in longest
        ]

    def summary(self, steps: int, shown: int) -> dict[str, Any]:
        """Milliseconds a step, of so many that were traced: of all, by class, and of so many kernels."""
        if not self.events:
            print("the profiler saw no kernel: GPU times by class are missing", file=sys.stderr)
        per_step = 1e-3 / steps
        return {
            "busy_ms": round(self.busy_us * per_step, 4),
            "by_class_ms": {kind: round(us * per_step, 4) for kind, us in self.by_class().items()},
            "kernels": [
                {"name": one["name"], "class": one["class"], "calls": one["calls"] / steps, "ms": one["us"] * per_step}
                for one in self.top(shown)
            ],
            "traced_steps": steps,
        }

    def _own(self) -> Iterator[tuple[str, float]]:
        """Names and microseconds; where two ran at once, the time is the first's, for which the other mostly waited."""
        reached = float("-inf")
        for event in sorted(self.events, key=lambda event: event.start):
            end = event.start + event.duration
            yield event.name, max(0.0, end - max(reached, event.start))
            reached = max(reached, end)


def class_of(name: str) -> str:
    """The class of a kernel."""
    if re.match(_FUSED, name):
        return "elementwise and norms"
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), "other")


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Trace what runs on the GPU in the block; both ends wait for it.

    The file of the trace is read instead of the profiler's own table, which counts annotated ranges as kernels too.
    """
    trace = Trace()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield trace
        torch.cuda.synchronize()
    with TemporaryDirectory(prefix="isthmus-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace.events += device_events(json.loads(path.read_text())["traceEvents"])


def device_events(entries: Iterable[dict[str, Any]]) -> Sequence[Event]:
    """The entries of a Chrome trace that ran on a GPU."""
    found = (entry for entry in entries if entry.get("ph") == "X" and entry.get("cat") in _DEVICE_EVENTS)
    return [Event(entry["name"], float(entry["ts"]), float(entry["dur"])) for entry in found]
