"""Hundreds of sequences that decode cost the host little: what is put off or done together, and that nobody notices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer

from isthmus.cache.prefix import PrefixCache
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.placement import Placement
from isthmus.engine.sequence import Request, Status
from isthmus.engine.step import Result, Results, Sampled, Step
from isthmus.memory import Copies, Plan, Writes
from isthmus.params import SamplingParams
from tests.engine.scripted import VOCAB, expected
from tests.engine.test_core import Answers, EngineFor, engine_for, run
from tests.engine.test_prefix_scheduling import WarmWorld
from tests.engine.test_scheduler import World
from tests.engine.toy_tokenizers import byte_level, llama, token_id

__all__ = ["engine_for"]


# -- results as arrays -------------------------------------------------------------------------------------------


def test_results_read_like_the_list_they_are_made_of() -> None:
    told: list[Result] = [3, Sampled(5, -0.5, 1), 0, Sampled(-1, problem="not a number")]
    results = Results.of(told)
    assert list(results) == told
    assert (len(results), results[1], results[2], results[1:3]) == (4, told[1], 0, told[1:3])
    assert results.ids[:3].tolist() == [3, 5, 0]
    assert results[:4] is Results.of(results) is results


# -- outputs at the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_level, llama])
@pytest.mark.parametrize("include", [False, True])
def test_an_output_at_the_end_is_what_the_increments_add_up_to(
    make: Callable[[], Tokenizer], engine_for: EngineFor, include: bool
) -> None:
    tokenizer = make()
    engine, prompt = engine_for(tokenizer, " the cat ä한🙂. the")
    params = SamplingParams(n=2, max_tokens=100, min_tokens=2, include_stop_str_in_output=include)
    cut = SamplingParams(max_tokens=9)  # inside a character
    for at_end in (False, True):
        engine.add_request(f"whole {at_end}", prompt, params, prompt="the cat", at_end=at_end)
        engine.add_request(f"cut {at_end}", prompt, cut, at_end=at_end)
    merged, pieces = run(engine)
    assert merged["whole True"].outputs == merged["whole False"].outputs
    assert merged["cut True"].outputs == merged["cut False"].outputs
    assert merged["whole True"].outputs[0].token_ids[-1] == token_id(tokenizer, "<eos>")
    assert merged["cut True"].outputs[0].finish_reason == "length"
    assert [len(pieces[name]) for name in ("whole True", "cut True")] == [1, 1], "both continuations end together"
    assert merged["whole True"].finished
    assert merged["whole True"].receipt is not None


def test_what_looks_at_single_tokens_is_told_of_them_all_the_same(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abcdef")
    engine.add_request("stop", prompt, SamplingParams(max_tokens=10, stop=["cd"]), at_end=True)
    engine.add_request("scores", prompt, SamplingParams(max_tokens=3, logprobs=1), at_end=True)
    merged, _ = run(engine)
    assert (merged["stop"].outputs[0].text, merged["stop"].outputs[0].stop_reason) == ("ab", "cd")
    assert len(merged["stop"].outputs[0].token_ids) == 4, "it ended with the token that completed the stop string"
    assert len(merged["scores"].outputs[0].logprobs or []) == 3


class Fails(Answers):
    """From the fourth step on there are no numbers."""

    def run(self, step):  # type: ignore[no-untyped-def]
        results = super().run(step)
        return [Sampled(-1, problem="not a number")] * len(results) if len(self.steps) > 3 else results


def test_a_problem_at_the_end_keeps_what_came_before_it(engine_for: EngineFor) -> None:
    engine, prompt = engine_for(byte_level(), "abcdef", answers=Fails)
    engine.add_request("a", prompt, SamplingParams(max_tokens=10), at_end=True)
    merged, _ = run(engine)
    (output,) = merged["a"].outputs
    assert (output.text, len(output.token_ids), output.finish_reason) == ("abc", 3, "abort")
    assert output.stop_reason == "not a number"


def test_nothing_is_said_of_a_sequence_before_it_ends() -> None:
    world = World("full", 4, 6, 60, overlap=True)
    request, loud = Request("quiet", [1, 2, 3], SamplingParams(max_tokens=20), at_end=True), world.add(3, 5)
    world.scheduler.add(request)
    heard: list[str] = []
    while world.has_work:
        step = world.plan() if world.scheduler.has_work and len(world.flights) < 2 else None
        if step is None or len(world.flights) > 1:
            heard += [sequence.request.request_id for sequence, _ in world.land()]
    assert heard == [loud.request_id] * 5 + ["quiet"]
    assert request.sequences[0].output == expected([1, 2, 3], 20)


# -- tokens in rows ----------------------------------------------------------------------------------------------


def test_tokens_that_nobody_asks_for_in_between_are_all_there() -> None:
    """More of them than a row has room for; all but the first are in flight when they are used."""
    world = World("full", 4, 6, 400)
    request, steps = world.add(5, 300), deque[Step]()
    for token in range(300):
        while len(steps) < 2 and (step := world.scheduler.schedule()) is not None:
            steps.append(step)
        world.scheduler.settle(steps.popleft(), [token])
    assert request.sequences[0].output == list(range(300))
    world.assert_empty()


def test_recent_tokens_of_a_row_are_those_of_its_sequence_round_and_round() -> None:
    """Whether they were gathered or not; what came before the row had its owner is not there."""
    world = World("full", 4, 6, 900)
    request = world.add(5, 700)
    (sequence,), at = request.sequences, world.scheduler.running.at
    world.step()
    for i in range(600):
        world.step()
        if i < 4 or i % 97:
            continue
        rows, known = np.array([sequence.row]), sequence.known
        first = next(start for start in range(known) if at.has_recent(rows, np.array([start]))[0])
        assert first == max(5, known - 256)
        for start in {first, max(first, known - 4), (first + max(first, known - 4)) // 2}:
            assert at.recent(rows, np.array([start]), 4).tolist() == [sequence.tokens(start, start + 4)]
    world.scheduler.preempt(sequence)
    known = sequence.known
    world.finish()
    world.assert_answers()
    assert known > 600


def test_a_token_taken_in_while_preempted_follows_the_others() -> None:
    world = World("full", 4, 6, 60, overlap=True)
    request = world.add(5, 30)
    (sequence,) = request.sequences
    for _ in range(4):
        world.advance()
    assert world.flights, "a token is in flight"
    world.scheduler.preempt(sequence)
    while world.flights:
        world.land()
    assert sequence.status is Status.PREEMPTED
    assert sequence.known == sequence.length
    world.finish()
    world.assert_answers()


def test_ends_of_a_row_are_those_of_its_sequence() -> None:
    """A row that had stop tokens is given to a sequence without."""
    world = World("full", 4, 6, 60)
    tokens = expected([1, 2, 3], 12)
    first = Request("first", [1, 2, 3], SamplingParams(max_tokens=12, stop_token_ids=[tokens[3], 90, 91]))
    world.scheduler.add(first)
    while world.scheduler.has_work:
        world.step()
    second = Request("second", [1, 2, 3], SamplingParams(max_tokens=12))
    world.scheduler.add(second)
    while world.scheduler.has_work:
        world.step()
    assert first.sequences[0].output == tokens[: tokens.index(tokens[3]) + 1]
    assert first.sequences[0].stop_reason == tokens[3]
    assert second.sequences[0].output == tokens


@pytest.mark.parametrize("others", [0, 7, 8, 5000])
def test_any_number_of_stop_tokens(others: int) -> None:
    """All of them end a sequence; what a client asks for does not make the arrays of all rows larger."""
    world = World("full", 4, 6, 60)
    before = world.scheduler.running.at._ends.nbytes
    tokens = expected([1, 2, 3], 12)
    stops = [*range(1000, 1000 + others), tokens[3]]
    request = Request("first", [1, 2, 3], SamplingParams(max_tokens=12, min_tokens=2, stop_token_ids=stops))
    late = Request("late", [1, 2, 3], SamplingParams(max_tokens=12, min_tokens=12, stop_token_ids=stops))
    for one in (request, late):
        world.scheduler.add(one)
    while world.scheduler.has_work:
        world.step()
    assert request.sequences[0].output == tokens[: tokens.index(tokens[3], 1) + 1]
    assert request.sequences[0].stop_reason == tokens[3]
    assert late.sequences[0].output == tokens
    assert world.scheduler.running.at._ends.nbytes == before


# -- pages together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["full", "full+window"])
@pytest.mark.parametrize("after", range(20, 28))
def test_whoever_comes_finds_all_full_pages_of_those_that_decode(shape: str, after: int) -> None:
    world = WarmWorld(shape, 4, 6, 80, overlap=True)
    first = world.ask(list(range(1, 8)), 60)
    for _ in range(after):
        world.advance()
    (sequence,) = first.sequences
    assert sequence.status is Status.RUNNING
    seen = [*first.prompt_token_ids, *sequence.output]
    full = min(sequence.past, sequence.known) // 4 * 4
    late = world.ask([*seen, 5], 4)
    world.advance()
    assert late.receipt.cached_tokens == full
    world.finish()
    world.assert_answers()


@pytest.mark.parametrize("shape", ["full", "full+window", "window alone"])
def test_pages_of_those_that_decode_are_had_for_some_steps_at_once(shape: str) -> None:
    world = World(shape, 4, 8, 120, budget=64, overlap=True)
    for i in range(4):
        world.add(5 + i, 90)
    for _ in range(4):
        world.advance()
    writes, running = [], world.scheduler.running
    blocks, at = world.scheduler.placement.blocks, running.at
    for _ in range(60):
        step = world.plan()
        assert step is not None
        writes.append(int(np.count_nonzero(step.block_writes.virtual)) > 0)
        needed = -(-at.past[running.rows] // 4)
        assert (blocks.columns[running.rows] >= needed).all()
        assert (blocks.columns[running.rows] <= needed + 1).all()
        world.land()
    assert sum(writes) <= (60 / 2 if shape == "window alone" else 60 / 4)
    world.finish()
    world.assert_answers()


def test_no_page_is_had_beyond_the_end_of_a_sequence() -> None:
    """An arena with room for just what each will have at last."""
    world = World("full", 4, 2, 36, budget=64)
    for _ in range(2):
        world.add(7, 30)  # 36 tokens are cached at last, 9 pages
    most, (group,) = 0, world.pool.groups
    while world.has_work:
        world.advance()
        most = max(most, world.used_pages(group))
    assert most == 18
    assert world.scheduler.counters.preemptions == 0
    world.assert_answers()


def test_where_there_is_no_room_pages_are_had_one_by_one() -> None:
    world = World("full", 4, 1, 60, budget=64)
    for _ in range(3):
        world.add(5, 55)
    world.finish()
    assert world.scheduler.counters.preemptions > 0
    world.assert_answers()


# -- locks on cached pages that a window has passed ---------------------------------------------------------------


def behind(world: WarmWorld) -> int:
    """Columns that windows had passed before the newest step and that are not given back, of whoever has most."""
    placement, running = world.scheduler.placement, world.scheduler.running
    rows, past = running.rows, running.past - 1
    return max(
        int((np.minimum(placement._kinds[name].dead(past), placement.blocks.columns[rows]) - passed[rows]).max())
        for name, passed in placement._passed.items()
    )


def far_behind_a_window(overlap: bool = False) -> WarmWorld:
    """Somebody decodes, and keeps a lock on a page of the prefix cache that nobody can see."""
    world = WarmWorld("full+window", 4, 6, 120, overlap=overlap)
    world.ask(list(range(1, 10)), 100)
    while len(world.scheduler.running) == 0 or world.scheduler.running[0].past < 40 or not behind(world):
        world.advance()
    return world


@pytest.mark.parametrize("overlap", [False, True])
def test_locks_are_kept_for_a_page_at_most(overlap: bool) -> None:
    world, seen = far_behind_a_window(overlap), set()
    for _ in range(40):
        seen.add(behind(world))
        world.advance()
    assert seen == {0, 1}
    world.ask([1, 2], 30)
    world.ask([3, 4], 30)
    world.scheduler.config = SchedulerConfig(1, 24)  # who comes waits for a row
    for _ in range(10):
        world.advance()
        assert not behind(world), "somebody waits, who is told what could be evicted"


def test_what_is_kept_gives_way_to_whoever_needs_it() -> None:
    world = far_behind_a_window()
    scheduler, pool = world.scheduler, world.pool
    assert scheduler.cache is not None
    locked, idle = dict(scheduler.cache.idle), dict(scheduler.cache.idle)
    idle["window1"] += 1
    most = 1
    while pool.could({"window1": most + 1}, idle):
        most += 1
    assert not pool.could({"window1": most}, locked), "it takes the page that is locked"
    assert isinstance(scheduler._room.plan({"window1": most}), Plan)
    world.finish()


def test_a_reset_forgets_what_is_kept_too() -> None:
    world = far_behind_a_window()
    world.scheduler.reset_prefix_cache()
    assert not behind(world)
    assert world.scheduler.cache is not None
    assert not any(world.scheduler.cache.idle.values())
    world.finish()


# -- those that wait ---------------------------------------------------------------------------------------------


class Count:
    """How often these methods are called."""

    def __init__(self, patch: pytest.MonkeyPatch, *methods: tuple[type, str]) -> None:
        self.calls = {name: 0 for _, name in methods}
        for owner, name in methods:
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **more: object) -> object:
            self.calls[name] += 1
            return method(*args, **more)

        return counted


@pytest.mark.parametrize("shape", ["full", "full+window", "full+state"])
def test_who_is_refused_for_memory_costs_nothing_more_while_nothing_has_changed(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up and priced once, and is given no row to take back."""
    world = WarmWorld(shape, 4, 1 if shape == "full" else 2, 80, budget=128, overlap=True)
    for i in range(4):
        world.ask([i, *range(20, 50)], 45)
    for _ in range(4):
        world.advance()
    late = world.ask([i % VOCAB for i in range(60, 60 + 77)], 3)
    world.advance()
    count = Count(
        monkeypatch,
        (PrefixCache, "match"),
        (Placement, "gains"),
        (Placement, "take_row"),
        (Placement, "vacate"),
    )
    for _ in range(8):
        world.advance()
        assert late.sequences[0].waited_for == "memory"
    assert count.calls == {"match": 0, "gains": 0, "take_row": 0, "vacate": 0}
    world.finish()
    world.assert_answers()


def test_states_of_one_step_are_saved_together() -> None:
    world = WarmWorld("full+state", 4, 12, 60, budget=64)
    for i in range(4):
        world.ask([i, *range(20, 31)], 10)
    world.step()  # 8 tokens each: to the last boundary before the last token
    step = world.step()
    copies = [op for op in step.delta.ops if isinstance(op, Copies)]
    assert [len(op.source) for op in copies] == [4]
    assert sum(isinstance(op, Writes) and op.group == "state1" for op in step.delta.ops) == 1
    world.finish()
    world.assert_answers()


def test_continuations_that_are_asked_for_together_compute_their_prompt_once() -> None:
    world = WarmWorld("full", 4, 12, 60, budget=64)
    world.ask([1, 2, 3], 4)
    world.ask([4, 5, 6], 4)
    world.ask(list(range(20, 37)), 4, n=3)  # the oldest runs, one is asked for, then two
    world.step()
    assert world.scheduler.counters.computed_tokens == 3 + 3 + 17
    assert [s.row >= 0 for s in world.requests[2].sequences] == [True, False, False]
    world.finish()
    world.assert_answers()


def test_who_shares_nothing_does_not_hold_up_others() -> None:
    """Its full pages are no news, however often it is asked for them: when memory is short, and when others start."""
    world = WarmWorld("full", 4, 1, 60, budget=128, overlap=True)
    for i in range(4):
        world.scheduler.add(request := Request(f"p{i}", [i] * 20, SamplingParams(max_tokens=38, prompt_logprobs=1)))
        world.requests.append(request)
    world.ask(list(range(9)), 20)
    world.serve()
    assert world.scheduler.counters.preemptions > 0
    assert all(r.is_finished for r in world.requests)
