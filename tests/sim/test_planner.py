"""A planner in virtual time saves states where the engine does, in a model of states alone too."""

from __future__ import annotations

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.sequence import Request
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.params import SamplingParams
from isthmus.sim.planner import Planner


def test_prefixes_of_states_alone_end_at_the_pages_that_were_asked_for() -> None:
    pool = Pool(1 << 16, [Group("state", opaque_spec(64), "state")])
    planner = Planner(
        pool, SchedulerConfig(4, 64), max_model_len=256, prefix_caching=True, page_size=16, clock=lambda: 0.0
    )
    prompt = list(range(100))
    hits = []
    for name in ("cold", "warm"):
        request = Request(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        planner.add(request)
        while (step := planner.schedule()) is not None:
            planner.settle(step, [0] * len(step.samples))
            pool.check()
        hits.append(request.receipt.cached_tokens)
    assert hits == [0, 96]
