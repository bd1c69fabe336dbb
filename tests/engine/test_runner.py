"""The executor applies deltas in order, checks every id at its door, and lets nobody's bytes into a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.engine.runner import Runner
from isthmus.engine.step import BlockWrites, Step
from isthmus.memory import Copies, Delta, Frees, Moves, Op, Pool, Writes
from isthmus.model.layout import derive
from tests.model.harness import Harness, Run, argmax, paged, tiny

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
MODEL = paged(tiny("gemma3_text", **SMALL))
ARENA = 1 << 16


def runner(*, poison: bool = False) -> Runner:
    return Runner(MODEL, derive(MODEL, 4, "float32"), ARENA, {"tokens": 40}, 4, argmax, poison=poison)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NO_BLOCKS = BlockWrites(ids(), ids(), ids())


def apply(target: Runner, *ops: Op) -> None:
    target.apply(Delta(list(ops)), NO_BLOCKS)


def page(target: Runner, group: str, index: int) -> torch.Tensor:
    """The bytes of one physical page."""
    size = next(g.spec.page_bytes for g in target.layout.groups if g.name == group)
    return target.arena[index * size : (index + 1) * size]


def test_operations_apply_in_order() -> None:
    """A page moves away, another takes its place, a third is copied from there: one after the other."""
    target = runner()
    for index in range(1, 9):
        page(target, "full", index).fill_(index)
    apply(
        target,
        Writes("full", ids(1, 2), ids(5, 6)),
        Moves("full", ids(5, 6), ids(2, 3)),
        Writes("full", ids(1, 2), ids(2, 3)),
        Moves("full", ids(8), ids(5)),
        Copies("full", ids(5, 2), ids(7, 6)),
    )
    assert [int(page(target, "full", i)[0]) for i in range(2, 9)] == [5, 6, 4, 8, 5, 8, 8]
    assert target.mirrors["full"].table[1:3].tolist() == [2, 3]
    assert (page(target, "full", 3) == 6).all()


def test_poison_fills_what_nobody_owns_any_more() -> None:
    target = runner(poison=True)
    for index in range(1, 9):
        page(target, "full", index).fill_(index)
    apply(target, Writes("full", ids(1, 2, 3), ids(5, 6, 7)), Moves("full", ids(5), ids(2)))
    apply(target, Writes("full", ids(1, 2), ids(2, 0)), Frees("full", ids(6)))
    assert [int(page(target, "full", i)[-1]) for i in (2, 5, 6, 7)] == [5, 0xFF, 0xFF, 7]
    assert (page(target, "full", 6) == 0xFF).all()


def test_copies_leave_their_source_alone() -> None:
    target = runner(poison=True)
    page(target, "full", 3).fill_(7)
    apply(target, Copies("full", ids(3), ids(4)))
    assert int(page(target, "full", 3)[0]) == int(page(target, "full", 4)[0]) == 7


@pytest.mark.parametrize(
    ("op", "named"),
    [
        (Writes("window", ids(41), ids(1)), "group 'window': virtual id 41 is not in 1..40"),
        (Writes("window", ids(3, 0), ids(1, 1)), "group 'window': virtual id 0 "),
        (Writes("full", ids(1), ids(-1)), "group 'full': page -1 "),
        (Writes("window", ids(1), ids(1 << 20)), "group 'window': page 1048576 "),
        (Moves("full", ids(1 << 20), ids(1)), "group 'full': page 1048576 "),
        (Moves("full", ids(1), ids(0)), "group 'full': page 0 "),
        (Copies("full", ids(0), ids(1)), "group 'full': page 0 "),
        (Frees("full", ids(1 << 20)), "group 'full': page 1048576 "),
    ],
)
def test_ids_and_pages_are_checked_at_the_door(op: Op, named: str) -> None:
    """IndexError naming group and id, and nothing has changed."""
    target = runner()
    before = target.mirrors[op.group].table.copy()
    with pytest.raises(IndexError, match=named):
        apply(target, op)
    assert (target.mirrors[op.group].table == before).all()


@pytest.mark.parametrize(
    ("writes", "named"),
    [
        (BlockWrites(ids(4), ids(0), ids(1)), "block table: row 4 is not in 0..3"),
        (BlockWrites(ids(0), ids(16), ids(1)), "block table: column 16 is not in 0..15"),
        (BlockWrites(ids(0), ids(0), ids(41)), "block table: virtual id 41 is not in 0..40"),
        (BlockWrites(ids(0), ids(-1), ids(1)), "block table: column -1 "),
    ],
)
def test_block_tables_are_checked_at_the_door(writes: BlockWrites, named: str) -> None:
    with pytest.raises(IndexError, match=named):
        runner().apply(Delta(), writes)


def one_token(past: int) -> Step:
    return Step(Delta(), NO_BLOCKS, ids(7), ids(0, 1), ids(past), ids(0), ())


def test_a_step_that_reads_an_unbound_page_raises() -> None:
    """The planner forgot a page: a loud error, not the null page's bytes."""
    target = runner()
    pages = [Writes(g, ids(1), ids(1)) for g in ("full", "window")]
    target.apply(Delta([*pages]), BlockWrites(ids(0), ids(0), ids(1)))
    assert target.run(one_token(3)) == []
    with pytest.raises(IndexError, match="group 'full': the step reads a token that has no page"):
        target.run(one_token(4))


def test_a_step_without_samples_skips_the_head() -> None:
    """Chunks in the middle of a prompt need no logits and call no sampler."""

    def refuse(*_: object) -> list[object]:
        raise AssertionError("nothing is to be sampled")

    target = runner()
    target.sampler = refuse  # type: ignore[assignment]
    head: Callable[..., torch.Tensor] = MODEL.lm_head.forward
    MODEL.lm_head.forward = refuse
    try:
        apply(target, *(Writes(g, ids(1), ids(1)) for g in ("full", "window")))
        target.apply(Delta(), BlockWrites(ids(0), ids(0), ids(1)))
        assert target.run(one_token(0)) == []
    finally:
        MODEL.lm_head.forward = head


def test_a_page_of_another_group_with_nan_does_not_reach_a_result() -> None:
    """Bytes that were a window page become a full page: what the former owner left must not count."""
    harness = Harness(MODEL, 4, arena_bytes=20 * 1024)
    first = harness.generate([list(range(1, 30)), list(range(9, 14))], 12, 5)
    for _ in range(3):
        assert harness.generate([list(range(1, 30)), list(range(9, 14))], 12, 5) == first


def test_a_sequences_tokens_do_not_depend_on_its_company() -> None:
    alone = Harness(MODEL, 4).generate([[3, 1, 4, 1, 5, 9, 2, 6]], 20, 3)[0]
    together = Harness(MODEL, 4).generate([[40] * 30, [3, 1, 4, 1, 5, 9, 2, 6], [2]], 20, 3)
    assert together[1] == alone


def test_mirrors_equal_the_pool_after_churn() -> None:
    harness = Harness(MODEL, 4, arena_bytes=32 * 1024, compact=True)
    runs = [Run(row, list(range(1, 6 + row))) for row in range(3)]
    for _ in range(9):
        harness.step(runs, 4)
    pool: Pool = harness.pool
    harness.runner.apply(pool.take_delta(), NO_BLOCKS)
    every = np.arange(1, pool.ids("tokens").capacity + 1)
    for name, mirror in harness.runner.mirrors.items():
        assert mirror.table[1:].tolist() == np.asarray(pool.table(name).translate(every)).tolist()
