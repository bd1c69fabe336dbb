"""Steps planned one ahead of their results: what may go on without them, what has to wait, what is thrown away."""

from __future__ import annotations

import pytest

from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Status
from isthmus.engine.step import Sampled, Step
from isthmus.memory import Pool
from tests.engine.scripted import VOCAB, Overlapping, ScriptedExecutor, expected
from tests.engine.test_prefix_scheduling import WarmWorld
from tests.engine.test_scheduler import SHAPES, World, groups


def overlapped(shape: str = "full+window", room_for: int = 6, length: int = 60, **more: object) -> World:
    return World(shape, 4, room_for, length, overlap=True, **more)  # type: ignore[arg-type]


def planned(world: World) -> Step:
    step = world.plan()
    assert step is not None
    return step


# -- what goes on ------------------------------------------------------------------------------------------------


def test_a_step_is_planned_on_tokens_that_the_one_before_it_samples() -> None:
    world = overlapped()
    request = world.add(5, 4)
    first, second = planned(world), planned(world)
    assert first.tokens.tolist() == request.prompt_token_ids
    assert (second.tokens.tolist(), second.past.tolist()) == ([-1], [5])
    assert [sample.position for sample in (*first.samples, *second.samples)] == [5, 6]
    assert request.sequences[0].output == []
    with pytest.raises(AssertionError, match="settle the step before the last one"):
        world.scheduler.schedule()
    world.land()
    third = planned(world)
    assert third.tokens.tolist() == [-1], "the first token is here, the second one is not"
    world.finish()
    world.assert_answers()


def test_steps_are_settled_in_the_order_they_were_planned() -> None:
    world = overlapped()
    world.add(5, 4)
    planned(world)
    second = planned(world)
    with pytest.raises(AssertionError, match="in the order"):
        world.scheduler.settle(second, [Sampled(1)])
    world.finish()


def test_everyone_decodes_in_every_step_and_nothing_is_wasted_on_ends_by_length() -> None:
    world = overlapped(room_for=8)
    for i in range(4):
        world.add(5, 3 + i)
    world.finish()
    world.assert_answers()
    counters = world.scheduler.counters
    assert counters.steps == 6
    assert counters.computed_tokens == sum(5 + 3 + i - 1 for i in range(4))
    assert isinstance(world.device, Overlapping)
    assert world.device.fed_back == sum(3 + i - 1 for i in range(4))


def test_a_last_token_in_flight_is_waited_for() -> None:
    world = overlapped()
    request = world.add(5, 1)
    planned(world)
    assert world.plan() is None
    assert [sequence for sequence, _ in world.land()] == request.sequences
    world.finish()


def test_min_tokens_counts_tokens_in_flight() -> None:
    world = overlapped()
    world.add(3, 5, min_tokens=2)
    allowed = []
    while world.scheduler.has_work:
        step = world.plan()
        allowed += [sample.allow_eos for sample in step.samples] if step is not None else []
        if step is None or len(world.flights) > 1:
            world.land()
    assert allowed == [False, False, True, True, True]


# -- what waits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}])
def test_a_choice_that_depends_on_the_token_in_flight_sits_out_and_the_others_go_on(params: dict[str, float]) -> None:
    world = overlapped()
    waits, goes_on = world.add(5, 4, **params), world.add(5, 8)
    planned(world)
    took_part = []
    while world.has_work:
        rows = [request.sequences[0].row for request in (waits, goes_on)]
        step = world.plan() if world.scheduler.has_work else None
        if step is not None:
            took_part.append([row in step.rows.tolist() for row in rows])
        world.land()
    assert took_part == [[False, True], [True, True]] * 3 + [[False, True]]
    world.assert_answers()


def test_a_prompt_with_a_penalty_is_computed_without_a_break() -> None:
    world = overlapped(budget=8)
    world.add(30, 2, presence_penalty=1.0)
    steps = [planned(world), planned(world)]
    world.land()
    steps.append(planned(world))
    assert [len(step.tokens) for step in steps] == [8, 8, 8]
    world.finish()
    world.assert_answers()


def test_sequences_that_end_with_their_flight_are_waited_for_before_anyone_is_preempted() -> None:
    world = overlapped("full")
    world.pool = Pool(64 * 6, groups(4, ("append", 64)))  # the null page and five
    world.scheduler = Scheduler(world.pool, world.config, max_model_len=20)
    world.executor = ScriptedExecutor(world.pool, 6)
    world.device = Overlapping(world.executor)
    world.add(1, 8)
    world.add(5, 12)  # needs its fourth page when the first has two and its last token is in flight
    world.finish()
    world.assert_answers()
    assert world.scheduler.counters.refusals == 1
    assert world.scheduler.counters.preemptions == 0


# -- what is thrown away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_an_end_token_costs_one_slot_and_its_pages_are_free_when_it_is_known(shape: str) -> None:
    tokens = expected_prompt_end(shape)
    world = overlapped(shape, eos=[tokens[2]])
    request = world.add(9, 40)
    planned(world)
    while request.sequences[0].status is not Status.FINISHED:
        planned(world)
        world.land()
    assert request.sequences[0].output == tokens[:3]
    world.assert_empty()  # though a step with it is still out
    assert world.scheduler.counters.computed_tokens == 9 + 3
    late = world.add(9, 3)
    planned(world)
    assert world.land() == [], "what was computed for a sequence that had ended is nobody's"
    world.finish()
    assert late.sequences[0].output[:1] != []
    world.assert_answers()


def expected_prompt_end(shape: str) -> list[int]:
    """Output of the first request of a world, if nothing ends it."""
    world = overlapped(shape)
    return expected(world.add(9, 40).prompt_token_ids, 40)


def test_a_row_that_changed_hands_keeps_the_results_apart() -> None:
    world = overlapped(seqs=1)
    old = world.add(5, 9)
    first = planned(world)
    planned(world)
    world.scheduler.abort("0")
    world.land()
    new = world.add(6, 3)
    third = planned(world)
    assert third.rows.tolist() == first.rows.tolist()
    assert world.land() == []
    assert (old.sequences[0].output, new.sequences[0].output) == ([], [])
    world.finish()
    world.assert_answers()


@pytest.mark.parametrize("shape", ["all kinds", "two windows"])
@pytest.mark.parametrize("out", [1, 2])
def test_abort_with_flights_out_gives_back_every_byte_at_once(shape: str, out: int) -> None:
    world = overlapped(shape, room_for=8, length=90, budget=200)
    request, other = world.add(40, 20, n=2), world.add(30, 9)
    planned(world), planned(world), world.land()
    if out == 2:
        planned(world)
    world.scheduler.abort(request.request_id)
    rows = {sequence.row for sequence in other.sequences}
    assert {s.row for s in world.scheduler.running} == rows
    world.scheduler.abort(other.request_id)
    world.assert_empty()
    while world.flights:
        assert world.land() == []
    world.add(50, 5)
    world.finish()
    world.assert_answers()


# -- preemption --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [1, 2])
def test_a_preempted_sequence_takes_in_what_is_in_flight_before_it_starts_again(out: int) -> None:
    world = overlapped()
    request = world.add(9, 6)
    (sequence,) = request.sequences
    for _ in range(out):
        planned(world)
    world.scheduler.preempt(sequence)
    while len(world.flights) > 1:
        world.land()
    assert world.plan() is None, "it starts without the token that is in flight"
    assert [sequence for sequence, _ in world.land()] == [sequence]
    assert (len(sequence.output), sequence.status, sequence.past) == (out, Status.PREEMPTED, 0)
    again = planned(world)
    assert again.tokens.tolist() == [*request.prompt_token_ids, *sequence.output]
    world.finish()
    world.assert_answers()


def test_a_preempted_sequence_may_end_with_what_is_in_flight() -> None:
    world = overlapped()
    request = world.add(9, 2)
    planned(world), planned(world)
    world.scheduler.preempt(request.sequences[0])
    world.land(), world.land()
    assert request.sequences[0].finish_reason == "length"
    world.assert_empty()
    world.assert_answers()


def test_a_prompt_preempted_in_flight_starts_again_at_once() -> None:
    world = overlapped(budget=8)
    request = world.add(20, 3)
    planned(world)
    world.scheduler.preempt(request.sequences[0])
    assert planned(world).past.tolist() == [0]
    world.finish()
    world.assert_answers()


# -- the prefix cache --------------------------------------------------------------------------------------------


def warm(shape: str, **more: object) -> WarmWorld:
    return WarmWorld(shape, 4, room_for=10, length=120, overlap=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["full", "full+window", "full+state", "all kinds"])
def test_a_prompt_can_be_restored_while_the_step_that_computes_it_is_out(shape: str) -> None:
    world = warm(shape, budget=200)
    tokens = [i % VOCAB for i in range(41)]
    first = world.ask(tokens, 20)
    planned(world)
    if shape in ("full+state", "all kinds"):
        planned(world)  # its last boundary is the end of a chunk, and then comes the rest
        world.land()
    second = world.ask(tokens, 20)
    step = planned(world)
    assert first.sequences[0].output == []
    assert second.receipt.cached_tokens == 40
    assert sorted(step.past.tolist()) == [40, 41]
    world.finish()
    world.assert_answers()


@pytest.mark.parametrize("shape", ["full+state", "all kinds"])
@pytest.mark.parametrize("length", [40, 41, 44, 47])
def test_a_state_is_saved_where_a_chunk_ends_and_not_a_step_later(shape: str, length: int) -> None:
    world = warm(shape, budget=16)
    tokens = [(7 * i) % VOCAB for i in range(length)]
    for _ in range(2):  # the executor compares every state that it goes on from with the tokens it stands for
        request = world.ask(tokens, 6)
        world.serve()
    assert request.receipt.cached_tokens == (length - 1) // 4 * 4
    world.finish()
    world.assert_answers()


@pytest.mark.parametrize("shape", ["full", "full+window", "full+state", "all kinds"])
@pytest.mark.parametrize("length", range(9, 14))
def test_what_an_ended_sequence_leaves_is_what_its_tokens_say(shape: str, length: int) -> None:
    """Its extra step has cached the end token; a conversation that goes on from there may use the page."""
    tokens = [(5 * i) % VOCAB for i in range(length)]
    said = expected(tokens, 5)
    world = warm(shape, eos=[said[-1]])
    world.ask(tokens, 40)
    world.serve()
    turn = world.ask([*tokens, *said, 1, 2, 3, 4, 5], 3)
    world.serve()
    assert turn.receipt.known_tokens >= (length + 5 - 1) // 4 * 4
    world.finish()


@pytest.mark.parametrize("shape", ["full", "all kinds"])
def test_tokens_that_are_not_here_are_not_named(shape: str) -> None:
    """Both flights out, of which the second fills a page with the token that the first samples: then it is gone."""
    world = warm(shape, budget=200)
    request = world.ask([3] * 6, 20)
    while len(world.flights) < 2 or request.sequences[0].past % 4:
        if len(world.flights) == 2:
            world.land()
        planned(world)
    assert request.sequences[0].past > request.sequences[0].known
    world.scheduler.abort(request.request_id)
    world.check_cache()
    world.finish()


def test_siblings_start_from_the_prompt_while_its_step_is_out() -> None:
    world = warm("full+window", budget=200)
    request = world.ask([5] * 30, 4, n=3)
    planned(world)
    step = planned(world)
    assert sorted(step.past.tolist()) == [28, 28, 30]
    assert request.sequences[0].output == []
    world.finish()
    world.assert_answers()


@pytest.mark.parametrize("ended", [False, True])
def test_a_problem_empties_the_cache_even_of_a_sequence_that_has_ended_meanwhile(ended: bool) -> None:
    world = warm("full", budget=200)
    request = world.ask([5] * 30, 20)
    step = planned(world)
    if ended:
        world.scheduler.abort(request.request_id)
    assert world.scheduler.cache is not None
    world.flights.clear()
    events = world.scheduler.settle(step, [Sampled(-1, problem="not a number")])
    assert len(events) == (not ended)
    assert request.sequences[0].finish_reason == "abort"
    assert len(world.scheduler.cache) == 0
    assert not world.scheduler.has_work


@pytest.mark.parametrize("shape", ["full", "full+window"])
def test_nobody_finds_pages_of_a_problem_that_others_still_use(shape: str) -> None:
    """Who started from them before it came to light keeps them alive, and makes more of them."""
    world, prompt = warm(shape, budget=200), [5] * 30
    world.ask(prompt, 20)
    step = planned(world)
    heir = world.ask([*prompt, 1], 20)
    planned(world)
    assert heir.receipt.cached_tokens == 28
    world.flights.popleft()[1].wait()
    world.scheduler.settle(step, [Sampled(-1, problem="not a number")])
    later = world.ask([*prompt, 2], 20)
    planned(world)
    assert later.receipt.known_tokens == 0
    world.serve()
    assert len(heir.sequences[0].output) == 20
    last = world.ask([*prompt, 1, *heir.sequences[0].output, 1], 3)
    world.finish()
    assert last.receipt.known_tokens == 28, "of the later one; the heir's own pages are not for others"
