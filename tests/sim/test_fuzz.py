"""A few hundred random worlds, and proof that fuzzing bites: planted bugs are found and told in a few lines."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isthmus import cli
from isthmus.cache.kind import CacheKind
from isthmus.cache.names import Namer
from isthmus.cache.prefix import PrefixCache
from isthmus.engine import rows
from isthmus.engine.admission import Admission
from isthmus.engine.placement import Placement
from isthmus.engine.rows import Rows
from isthmus.engine.scheduler import Scheduler
from isthmus.memory import Copies, Group, Moves, Op, opaque_spec
from isthmus.memory.arena import Chain
from isthmus.memory.region import Region
from isthmus.sim import fuzz, fuzz_shadow
from isthmus.sim.fuzz_events import (
    Abort,
    Add,
    Compact,
    Event,
    Land,
    Plan,
    Preempt,
    Refuse,
    Reset,
    Spoil,
    Stop,
    Turn,
)
from isthmus.sim.fuzz_model import SAYS
from isthmus.sim.fuzz_run import Run, explore, replay
from isthmus.sim.fuzz_shrink import shrink
from isthmus.sim.fuzz_world import World
from tests import command

WORLDS = 160

REACHED = {
    "aborted in prefill", "aborted preempted", "aborted running", "aborted waiting", "aborted with a token in flight",
    "hits cut by a kind", "pages evicted", "pages moved", "pages pinned", "plans refused", "preempted by order",
    "preemptions", "problems", "prompt tokens cached", "requests refused", "states copied", "stopped",
    "tokens fed back",
}  # fmt: skip


RECENT = (256, 1, 2, 3, 5, 8)
"""Tokens of a row at hand, in turn: as many as ever, whose end no world comes to, and so few that all do."""


def test_random_worlds_keep_every_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: Counter[str] = Counter()
    for seed in range(WORLDS):
        monkeypatch.setattr(rows, "_RECENT", recent := RECENT[seed % len(RECENT)])
        run = explore(seed)
        again = f"isthmus bench fuzz --seed {seed}, with {recent} recent tokens"
        assert run.failure is None, "\n".join([again, str(run.failure), *run.lines()])
        reached += run.seen
    assert {what for what in REACHED if not reached[what]} == set(), "the worlds do not go there any more"


# -- planted bugs ------------------------------------------------------------------------------------------------


def unbinds_a_column_too_many(patch: pytest.MonkeyPatch) -> None:
    right = Placement.unbind_passed

    def wrong(self: Placement, rows: Any, past: Any) -> None:
        right(self, rows, past + max(group.spec.page_size for group in self._pool.groups.values()))

    patch.setattr(Placement, "unbind_passed", wrong)


def unbinds_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "unbind_passed", lambda *_: None)


def loses(kind: type[Op]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = fuzz_shadow._Mirror.apply

        def wrong(self: Any, op: Op) -> None:
            if not isinstance(op, kind):
                right(self, op)

        patch.setattr(fuzz_shadow._Mirror, "apply", wrong)

    return plant


def moves_floats_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chain, "move_order", lambda _, spans: list(range(len(spans)))[::-1])


def moves_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    right = Region.cover

    def wrong(self: Region, *, keep: bool) -> tuple[int, int]:
        return right(self, keep=True) if keep else (self.last, self.first)

    patch.setattr(Region, "cover", wrong)


def shares_a_page_one_token_early(patch: pytest.MonkeyPatch) -> None:
    right = Placement.share

    def wrong(self: Placement, rows: Any, past: Any, names: Any) -> None:
        assert self.cache is not None
        size = self.cache.roles.page_size
        there = np.minimum([len(name.pages) for name in names], self.blocks.columns[rows]) * size
        right(self, rows, np.maximum(past, np.minimum(there, past + 1)), names)

    patch.setattr(Placement, "share", wrong)


def keeps_the_state_of_what_is_aborted(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.abort

    def wrong(self: Scheduler, request_id: str) -> bool:
        self.placement._states[[s.row for s in self.requests[request_id].sequences if s.row >= 0]] = 0
        return right(self, request_id)

    patch.setattr(Scheduler, "abort", wrong)


def computes_more_than_the_budget(patch: pytest.MonkeyPatch) -> None:
    right = Admission.admit

    def wrong(self: Admission, chunks: Any, budget: int) -> Any:
        return right(self, chunks, budget + 1)

    patch.setattr(Admission, "admit", wrong)


def admits_what_the_cap_forbids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("isthmus.engine.room.Room._over_cap", lambda *_: 0)


class _Lax:
    """A kind that says of one column more that nobody can see it."""

    def __init__(self, kind: CacheKind) -> None:
        self._kind = kind

    def dead(self, length: Any) -> Any:
        return np.minimum(self._kind.dead(length) + 1, length // self._kind.page_size)


def restores_windows_where_they_have_gone(patch: pytest.MonkeyPatch) -> None:
    right = PrefixCache.match

    def wrong(self: PrefixCache, names: Any, tokens: int) -> Any:
        roles = self.roles
        kinds: Any = {name: _Lax(kind) if name in roles.spans else kind for name, kind in roles.kinds.items()}
        self.roles = dataclasses.replace(roles, kinds=kinds)
        match = right(self, names, tokens)
        self.roles = roles
        return match

    patch.setattr(PrefixCache, "match", wrong)


def saves_states_beside_the_boundary(patch: pytest.MonkeyPatch) -> None:
    right = Placement.keep

    def wrong(self: Placement, row: int, past: int, names: Any) -> None:
        size = 1 if self.cache is None else self.cache.roles.page_size
        right(self, row, past // size * size, names)

    patch.setattr(Placement, "keep", wrong)


def takes_no_notice_of_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Namer, "root", lambda self, salt: self.name(b""))


def never_unlocks(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PrefixCache, lock: str, ids: Any) -> Any:
        return self._holdings.slot_of[self._holdings.space(lock)][ids] == 0

    patch.setattr(PrefixCache, "unlock", wrong)


def trusts_the_cache_after_a_problem(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "distrust_prefix_cache", lambda _: None)


def forgets_a_token_when_it_preempts(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.preempt

    def wrong(self: Scheduler, sequence: Any) -> None:
        right(self, sequence)
        del sequence.output[-1:]

    patch.setattr(Scheduler, "preempt", wrong)


def never_starts_what_was_preempted(patch: pytest.MonkeyPatch) -> None:
    right = Admission.oldest

    def wrong(self: Admission) -> None:
        if self.waiting[0].status.value != "preempted":
            right(self)

    patch.setattr(Admission, "oldest", wrong)


def names_pages_by_tokens_it_has_no_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows, "_RECENT", 4)
    patch.setattr(Rows, "has_recent", lambda self, which, start: start >= self._first[which])


def names_pages_by_tokens_that_came_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "has_recent", lambda self, which, start: start >= self.known[which] - rows._RECENT)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    plant.__name__ if name is None else name: (plant, seed)
    for name, plant, seed in (
        (None, unbinds_a_column_too_many, 3),
        (None, unbinds_nothing, 0),
        ("loses moves", loses(Moves), 0),
        ("loses copies", loses(Copies), 1),
        (None, moves_floats_in_the_wrong_order, 5),
        (None, moves_what_is_pinned, 28),
        (None, shares_a_page_one_token_early, 47),
        (None, keeps_the_state_of_what_is_aborted, 21),
        (None, computes_more_than_the_budget, 1),
        (None, admits_what_the_cap_forbids, 73),
        (None, restores_windows_where_they_have_gone, 30),
        (None, saves_states_beside_the_boundary, 50),
        (None, takes_no_notice_of_the_salt, 15),
        (None, never_unlocks, 4),
        (None, trusts_the_cache_after_a_problem, 52),
        (None, forgets_a_token_when_it_preempts, 9),
        (None, never_starts_what_was_preempted, 160),
        (None, names_pages_by_tokens_it_has_no_more, 0),
        (None, names_pages_by_tokens_that_came_before, 0),
    )
}
"""What is planted, and a seed near which it shows."""


def first_failure(seed: int, worlds: int = 60) -> Run:
    for run in map(explore, range(seed, seed + worlds)):
        if run.failure is not None:
            return run
    raise AssertionError(f"{worlds} worlds from seed {seed} found nothing")


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_and_told_in_a_few_events(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, seed = PLANTED[bug]
    plant(monkeypatch)
    found = first_failure(seed)
    small, _ = shrink(found, most_runs=150)
    assert small.failure is not None
    assert found.failure is not None
    assert small.failure.kind == found.failure.kind
    assert len(small.events) <= 5, "\n".join(small.lines())
    assert replay(small.world, small.events) == small, "the script does not fail again in the same way"


# -- the command -------------------------------------------------------------------------------------------------


def world(**changes: Any) -> World:
    groups = (Group("full", opaque_spec(64, 4), "append"), Group("state", opaque_spec(96), "state"))
    plain = World(groups, 4096, None, 40, 4, 16, None, True, True, 31, (1,))
    return dataclasses.replace(plain, **changes)


EVERY: list[Event] = [
    Add("r0", ((0, 10), (7, 3)), 12, n=2, seed=5, min_tokens=2), Refuse(1), Turn(3),
    Add("r1", ((0, 10),), salt="other"), Abort("r1"), Add("r2", ((0, 10), (SAYS, 2)), 5, penalty=True),
    Plan(), Land(), Preempt("r0", 1), Compact(2),
    Spoil("r0", 0), Turn(3), Stop("r0", 1), Reset(), Abort("nobody"),
]  # fmt: skip


def test_any_part_of_a_script_is_a_script() -> None:
    whole = replay(world(), EVERY)
    assert whole.failure is None
    reached = {"aborted waiting", "preempted by order", "pages pinned", "problems", "stopped", "tokens fed back"}
    assert {what for what in reached if not whole.seen[what]} == set()
    assert whole.digest == replay(world(), EVERY[:-1]).digest, "the last one is about nobody"
    for i in range(len(EVERY)):
        assert replay(world(), EVERY[:i] + EVERY[i + 1 :]).failure is None


def test_a_seed_is_the_same_run_in_every_process() -> None:
    code = "from isthmus.sim.fuzz_run import explore; print(*(explore(seed).digest for seed in (3, 8, 21)))"
    answers = set()
    for hashes in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": hashes}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        answers.add(done.stdout)
    assert answers == {" ".join(explore(seed).digest for seed in (3, 8, 21)) + "\n"}


def test_a_failure_is_told_with_its_seed_and_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_unlocks(monkeypatch)
    assert cli.main(["bench", "fuzz", "--seed", "4", "--worlds", "3"]) == 1
    text = capsys.readouterr().out
    failure = explore(4).failure
    assert failure is not None
    assert f"seed 4: {failure.kind}: " in text
    assert "  1  add r" in text
    assert "again: isthmus bench fuzz --seed 4" in text
    assert "3 worlds from seed 4" in text


def test_failures_of_one_kind_are_shrunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    never_unlocks(monkeypatch)
    failures = fuzz.run(worlds=4, seed=4)["failures"]
    kinds = [failure["kind"] for failure in failures]
    assert len(set(kinds)) < len(kinds), "no kind is there twice"
    shrunk = [failure["runs_to_shrink"] > 0 for failure in failures]
    assert shrunk == [kind not in kinds[:i] for i, kind in enumerate(kinds)]


def test_the_command_counts_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "fuzz", "--seed", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["seed"], result["worlds"], result["failures"]) == (5, 1, [])
    assert result["reached"]["steps"] > 0
    assert "--worlds must be at least 1" in command.refusal(
        command.run("bench", "fuzz", "--worlds", 0), *capsys.readouterr()
    )


def test_ctrl_c_tells_what_was_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = iter((explore(0), explore(1)))

    def until_now(_: int) -> Run:
        for run in runs:
            return run
        raise KeyboardInterrupt

    monkeypatch.setattr(fuzz, "explore", until_now)
    assert cli.main(["bench", "fuzz"]) == 130
    assert "2 worlds from seed 0" in (told := capsys.readouterr().out)
    assert "interrupted in seed 2" in told
