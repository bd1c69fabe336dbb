"""Each fault planted in what the planner hands out is named with its request, group and page; the page is fenced;
everybody else is served on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isthmus.engine.output import CompletionOutput
from isthmus.engine.sanitizer.cut import entries
from isthmus.engine.step import BlockWrites, Step
from isthmus.memory import Moves, Op, PhysicalPages, Plan, Writes
from isthmus.params import RequestError, SamplingParams
from tests.engine.sanitized import PAGE, WINDOW, Tampered, sequence_of, serve, with_ops
from tests.engine.sanitized_case import NEW, PROMPTS, Case, Truth, told


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth.of()


@pytest.fixture(params=[False, True], ids=["one at a time", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def case(truth: Truth, caplog: pytest.LogCaptureFixture, overlap: bool) -> Case:
    return Case(truth, caplog, overlap=overlap)


# -- pages that the planner gives away too early -------------------------------------------------------------


def test_a_page_freed_while_in_use(case: Case) -> None:
    seen: list[tuple[int, int]] = []

    def free() -> None:
        virtual = case.ids("a")[3]
        seen.append((virtual, case.place("window", virtual)))
        seen.append((virtual, case.place("full", virtual)))
        case.engine.pool.release("tokens", [virtual])

    report = case.plant(6, free, "a")
    virtual, page = seen[1] if "group     full" in report else seen[0]
    assert report.startswith("memory fault (freed): a page was given back while a sequence still needs it")
    told(report, request="'a'", page=f"page {page} (virtual id {virtual})", done="ended: 'a'; everybody else")
    history = report.split("oldest first\n")[1].splitlines()
    assert "granted to id" in history[0]
    assert "of 'a'" in history[0]
    assert "written by 'a'" in history[1]
    assert any(f"freed by id {virtual}" in line for line in history)
    assert case.is_fenced("window", page), "at once, or when the one that got it meanwhile was done with it"


def test_a_window_unbound_one_page_early(case: Case) -> None:
    seen: list[int] = []

    def unbind() -> None:
        position = sequence_of(case.engine, "a").past
        virtual = case.ids("a")[(position - WINDOW + 1) // PAGE]
        seen.extend((virtual, case.place("window", virtual)))
        case.engine.pool.unbind("window", [virtual])

    report = case.plant(7, unbind, "a")
    virtual, page = seen
    told(report, request="'a'", group="window, layers 0-1", page=f"page {page} (virtual id {virtual})")
    told(report, found="reads tokens", done="ended: 'a'; everybody else")
    assert case.is_fenced("window", page)


# -- what is handed out about moves and grants ----------------------------------------------------------------


class Change:
    """Once armed, it changes the next delta in which a group has an operation of this kind; all holes are closed."""

    def __init__(self, case: Case, kind: type[Op], group: str, change: Callable[[list[Op], int], object]) -> None:
        self.case, self.kind, self.group, self.change = case, kind, group, change
        self.armed = self.done = False
        self.owners: dict[int, str] = {}  # whose id it was
        Tampered(case.engine, self.tamper)

    def serve(self) -> dict[str, CompletionOutput]:
        return self.case.serve(self.between)

    def between(self, step: int) -> None:
        if step >= 5 and not self.done:
            self.armed = True
            self.case.engine.pool.compact()

    def tamper(self, step: Step) -> Step:
        ops = list(step.delta.ops)
        at = [i for i, op in enumerate(ops) if isinstance(op, self.kind) and op.group == self.group]
        if not self.armed or not at:
            return step
        self.armed, self.done = False, True
        self.owners = {v: name for name in self.case.running() for v in self.case.ids(name) if v}
        self.change(ops, at[0])
        return with_ops(step, ops)


def without_first(op: Op) -> Op:
    """All entries but one."""
    return entries(op, np.arange(len(op.virtual if isinstance(op, Writes) else op.source)) > 0)  # type: ignore[union-attr]


def test_a_table_entry_that_is_stale_after_a_move(case: Case) -> None:
    seen: list[int] = []

    def forget_the_entry(ops: list[Op], at: int) -> None:
        move, write = ops[at], ops[at + 1]
        assert isinstance(move, Moves)
        assert isinstance(write, Writes)
        seen.extend((int(move.source[0]), int(move.destination[0]), int(write.virtual[0])))
        ops[at + 1] = without_first(write)

    change = Change(case, Moves, "full", forget_the_entry)
    outputs = change.serve()
    source, destination, virtual = seen
    victim = change.owners[virtual]
    report = case.judge(outputs, victim)
    assert report.startswith("memory fault (stale): a table entry names a place that the page has left")
    told(report, request=repr(victim), group="full, layer 2", page=f"page {source} (virtual id {virtual})")
    told(report, found=f"where id {virtual} has been moved to page {destination}")
    assert f"moved to page {destination}" in report.splitlines()[-1]
    assert case.is_fenced("full", source)


def test_a_move_that_is_not_carried_out(case: Case) -> None:
    """Its table entry is: the page is looked for where nobody has put it."""
    seen: list[int] = []

    def forget_the_move(ops: list[Op], at: int) -> None:
        move, write = ops[at], ops[at + 1]
        assert isinstance(move, Moves)
        assert isinstance(write, Writes)
        seen.extend((int(move.source[0]), int(move.destination[0]), int(write.virtual[0])))
        ops[at] = without_first(move)

    change = Change(case, Moves, "window", forget_the_move)
    outputs = change.serve()
    source, destination, virtual = seen
    victim = change.owners[virtual]
    report = case.judge(outputs, victim)
    assert report.startswith("memory fault (double): a page has two owners")
    told(report, request=repr(victim), group="window, layers 0-1", page=f"page {source} (virtual id {virtual})")
    told(report, found=f"binds id {virtual} to page {destination} while it has page {source}")
    assert f"written by {victim!r}" in report
    assert case.is_fenced("window", source)


def test_a_page_that_moves_while_it_is_pinned(case: Case) -> None:
    seen: list[int] = []

    def pin() -> None:
        pool, region = case.engine.pool, case.engine.pool.regions["full"]
        virtual = int(region.owner[region.lo])
        seen.extend((region.lo, virtual))
        pool.pin("full", [virtual])

    def move() -> None:
        region = case.engine.pool.regions["full"]
        if len(seen) > 2 or not len(region.holes):
            return
        seen.append(next(ord(name) for name in case.running() if seen[1] in case.ids(name)))
        pins, region.pins = region.pins, {}
        case.engine.pool.compact()
        assert not region.owner[seen[0]], "it did move"
        region.pins = pins

    def between(step: int) -> None:
        if step == 3:
            pin()
        elif step > 3:
            move()
        if case.reports and len(seen) == 3:
            seen.append(0)
            case.engine.pool.unpin("full", np.array(seen[:1], np.int32).view(PhysicalPages))

    outputs = case.serve(between)
    page, virtual, victim = seen[0], seen[1], chr(seen[2])
    report = case.judge(outputs, victim)
    assert report.startswith("memory fault (moved): a page was moved that must not move")
    told(report, request=repr(victim), group="full, layer 2", page=f"page {page} (virtual id {virtual})")
    told(report, found="which is pinned")
    assert case.is_fenced("full", page)


def test_a_page_with_two_owners(case: Case) -> None:
    """Another sequence is granted a page that somebody has: nobody knows whose it is, so both end."""
    seen: list[int] = []

    def grant_twice(ops: list[Op], at: int) -> None:
        write = ops[at]
        assert isinstance(write, Writes)
        bound = np.flatnonzero(write.physical > 0)[0]
        virtual = int(write.virtual[bound])
        victim = next(name for name in case.running() if virtual not in case.ids(name))
        theirs = case.ids(victim)[-1]
        seen.extend((case.place("full", theirs), theirs, virtual))
        physical = write.physical.copy()
        physical[bound] = seen[0]
        ops[at] = Writes("full", write.virtual, physical)

    change = Change(case, Writes, "full", grant_twice)
    outputs = change.serve()
    page, first, second = seen
    victims = change.owners[first] + change.owners[second]
    report = case.judge(outputs, victims)
    assert report.startswith("memory fault (double): a page has two owners")
    told(report, request=", ".join(repr(name) for name in sorted(victims)), page=f"page {page} (virtual id ")
    told(report, found=f"binds page {page} to id ", done=f"page {page} is fenced")
    assert case.is_fenced("full", page)


# -- ids -------------------------------------------------------------------------------------------------------


def test_a_physical_page_used_as_a_virtual_id(case: Case) -> None:
    """A block table gets places where ids are due."""
    seen: list[int] = []

    def confuse(step: Step) -> Step:
        writes = step.block_writes
        if case.engine.scheduler.counters.steps < 9 or seen or not (writes.virtual > 0).any():
            return step
        at = int(np.flatnonzero(writes.virtual > 0)[-1])
        virtual = writes.virtual.copy()
        virtual[at] = case.place("full", int(virtual[at]))
        row = int(writes.row[at])
        seen.append(next(ord(name) for name in case.running() if sequence_of(case.engine, name).row == row))
        seen.append(int(virtual[at]))
        return dataclasses.replace(step, block_writes=dataclasses.replace(writes, virtual=virtual))

    Tampered(case.engine, confuse)
    outputs = case.serve()
    victim = chr(seen[0])
    report = case.judge(outputs, victim)
    told(report, request=repr(victim), page=f"(virtual id {seen[1]})", done=f"ended: {victim!r}; everybody else")


def test_a_planner_that_names_anothers_page(case: Case) -> None:
    """Its own table has it too: whoever has the page rightfully keeps it, and what was forgotten is fenced."""
    seen: list[int] = []

    def confuse() -> None:
        seen.extend((case.ids("a")[2], case.ids("c")[1]))
        row = sequence_of(case.engine, "a").row
        blocks = case.engine.scheduler.placement.blocks
        blocks.replace(np.array([row]), np.array([2]), np.array([seen[1]], np.int32))

    report = case.plant(8, confuse, "a")
    forgotten, theirs = seen
    assert report.startswith("memory fault (foreign)")
    told(report, request="'a'", page=f"(virtual id {theirs})", found="on a page that 'c' had first")
    told(report, done="left to 'c', whose it is now")
    assert case.reports[1].startswith("memory fault (leak)")
    assert case.is_fenced_id(forgotten)


def test_a_sequence_that_reads_its_own_page_for_another_column(case: Case) -> None:
    """It is live, its own and written: only what it holds is wrong."""
    seen: list[int] = []

    def confuse(step: Step) -> Step:
        if case.engine.scheduler.counters.steps != 9:
            return step
        seen.extend(case.ids("a")[3:5])
        row = sequence_of(case.engine, "a").row
        writes = step.block_writes
        more = (row, 3, seen[1])
        added = [
            np.append(x, np.int32(v)) for x, v in zip((writes.row, writes.column, writes.virtual), more, strict=True)
        ]
        return dataclasses.replace(step, block_writes=BlockWrites(*added))

    Tampered(case.engine, confuse)
    report = case.judge(case.serve(), "a")
    told(report, request="'a'", page=f"(virtual id {seen[1]})", found="(column 3), on a page that 'a' had first")


def test_a_cached_page_freed_while_two_use_it(truth: Truth, caplog: pytest.LogCaptureFixture, overlap: bool) -> None:
    """Both sequences end, what is cached is dropped, and a third is not concerned."""
    case = Case(truth, caplog, overlap=overlap, prefix_caching=True)
    prompts = {"first": PROMPTS["d"], "second": PROMPTS["d"], "other": PROMPTS["c"]}
    seen: list[int] = []

    def free(step: int) -> None:
        running = case.running()
        if seen or not {"first", "second"} <= set(running) or sequence_of(case.engine, "second").past < 28:
            return
        seen.extend(case.ids("first")[3:4])
        if seen == case.ids("second")[3:4]:
            case.engine.pool.release("tokens", seen)
        else:
            seen.clear()

    outputs = serve(case.engine, prompts, 14, free)
    assert seen, "they do share"
    assert [outputs[name].finish_reason for name in prompts] == ["abort", "abort", "length"]
    assert outputs["other"].token_ids == truth.wanted["c"]
    told(case.reports[0], page=f"(virtual id {seen[0]})", request="'first'")
    told(case.reports[1], page=f"(virtual id {seen[0]})", request="'second'")
    outputs = serve(case.engine, prompts, 14)
    assert [outputs[name].token_ids for name in prompts] == [truth.wanted[name] for name in "ddc"]
    assert len(case.reports) == 2


@pytest.mark.parametrize("strange", [-1, 1 << 20])
def test_an_id_that_does_not_exist_in_a_block_table(case: Case, strange: int) -> None:
    seen: list[str] = []

    def spoil(step: Step) -> Step:
        writes = step.block_writes
        if case.engine.scheduler.counters.steps < 9 or seen or not (writes.virtual > 0).any():
            return step
        at = int(np.flatnonzero(writes.virtual > 0)[0])
        virtual = writes.virtual.copy()
        virtual[at] = strange
        row = int(writes.row[at])
        seen.append(next(name for name in case.running() if sequence_of(case.engine, name).row == row))
        return dataclasses.replace(step, block_writes=dataclasses.replace(writes, virtual=virtual))

    Tampered(case.engine, spoil)
    outputs = case.serve()
    report = case.judge(outputs, seen[0])
    assert report.startswith("memory fault (range)")
    told(report, request=repr(seen[0]), found=f"the block table would get id {strange}", done="is fenced")


def test_what_is_refused_at_the_door(case: Case) -> None:
    """-1, an id that nobody has, one given twice, places instead of ids: nothing happens to anybody."""
    pool = case.engine.pool

    def knock() -> None:
        mine = case.ids("a")[-1]
        free = int(pool.ids("tokens").free_ids()[-1])
        for ids in ([-1], [free], np.array([5, 7], np.int32).view(PhysicalPages)):
            pool.release("tokens", ids)
        pool.unbind("window", [free])
        assert pool.ids("tokens").is_live([mine]).all()

    report = case.plant(7, knock, "")
    assert len(case.reports) == 4
    assert report.startswith("memory fault (door): the pool was asked for something that cannot be done to an id")
    told(report, found="id -1 of tokens is refused: there is no such id", done="everybody is served on")
    told(case.reports[1], found="it is not live; 's' had it last")
    told(case.reports[2], found="physical pages given where virtual page ids are due")


def test_an_id_that_is_given_back_twice_is_given_back_once(case: Case) -> None:
    pool, release = case.engine.pool, case.engine.pool.release

    def twice(space: str, ids: Any) -> None:
        release(space, np.concatenate((np.asarray(ids), np.asarray(ids)[:1])))

    pool.release = twice  # type: ignore[method-assign]
    outputs = case.serve()
    assert {name: output.token_ids for name, output in outputs.items()} == case.truth.wanted
    assert case.reports
    told(case.reports[0], found="it is given twice", request="had it last")


@pytest.mark.parametrize("check", ["audit", "full"])
def test_an_abort_that_forgets_a_page(truth: Truth, caplog: pytest.LogCaptureFixture, check: str) -> None:
    case = Case(truth, caplog, check=check)
    blocks, seen = case.engine.scheduler.placement.blocks, list[int]()
    give_row = blocks.give_row

    def forgetful(row: int) -> Any:
        ids = give_row(row)
        seen.extend(ids[-1:].tolist())
        return ids[:-1]

    def abort() -> None:
        blocks.give_row = forgetful  # type: ignore[method-assign]
        case.engine.abort("a")
        blocks.give_row = give_row  # type: ignore[method-assign]

    outputs = serve(case.engine, PROMPTS, NEW, lambda step: abort() if step == 8 else None, vanishing="a")
    assert all(outputs[name].token_ids == truth.wanted[name] for name in "sbcd")
    (virtual,) = seen
    (report,) = case.reports
    assert report.startswith("memory fault (leak): an id is live and nobody has it")
    told(
        report,
        request="'a', which had it last",
        page=f"(virtual id {virtual})",
        done=f"is fenced with id {virtual}; everybody",
    )
    assert case.is_fenced_id(virtual)
    assert {name: output.token_ids for name, output in case.serve().items()} == truth.wanted
    assert len(case.reports) == 1


# -- room ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_beside_fenced_pages_is_refused_or_ended(
    truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for memory that nobody will ever give back, and the engine does not die of it."""
    case = Case(truth, caplog, arena_bytes=40 << 10)
    engine, longest = case.engine, case.engine.scheduler.longest
    params = SamplingParams(temperature=0, max_tokens=longest - 20, ignore_eos=True)
    engine.add_request("long", PROMPTS["a"], params)
    engine.add_request("short", PROMPTS["b"], SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    ended: dict[str, CompletionOutput] = {name: CompletionOutput(0) for name in ("long", "short")}
    steps = 0
    while engine.has_work:
        if steps == 2:
            leaked = engine.pool.plan({"full": 4, "window": 4})
            assert isinstance(leaked, Plan)
            engine.pool.commit(leaked, {"window": leaked.ids["tokens"]})
        for output in engine.step():
            ended[output.request_id].merge(output.outputs[0])
        engine.pool.check()
        steps += 1
    assert case.reports[0].startswith("memory fault (leak)")
    assert engine.scheduler.longest < longest
    assert ended["long"].finish_reason == "abort"
    assert "pages are fenced after a memory fault" in str(ended["long"].stop_reason)
    assert ended["short"].token_ids == truth.wanted["b"]
    with pytest.raises(RequestError, match="the longest sequence that fits has"):
        engine.add_request("long", PROMPTS["a"], params)
