"""What must be true of a scheduler after every operation, besides what its parts assert of themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from isthmus.cache import kind_of
from isthmus.engine.blocks import ragged
from isthmus.engine.samples import is_plain, looks_back
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request, Sequence, Status
from isthmus.engine.step import Step
from isthmus.sim.fuzz_world import World


def check_state(scheduler: Scheduler) -> None:
    """Every equation of pool and cache, conservation of bytes, and an owner for every id."""
    scheduler.pool.check()
    idle = scheduler.placement.idle
    scheduler.pool.usage(idle).check()
    _check_running(scheduler)
    _check_names(scheduler)
    _check_owners(scheduler)
    if not scheduler.running:
        for name, region in scheduler.pool.regions.items():
            cached = idle.get(name, 0)
            assert region.live == cached, f"{name}: nothing runs, {region.live} pages are live, {cached} cached"


def _check_running(scheduler: Scheduler) -> None:
    running, at = scheduler.running, scheduler.running.at
    assert [s.order for s in running] == sorted(s.order for s in running), "the running are not sorted by age"
    assert [s.order for s in scheduler.waiting] == sorted(s.order for s in scheduler.waiting), "nor are the waiting"
    assert running.rows.tolist() == [s.row for s in running], "rows by age are not the sequences'"
    assert set(np.flatnonzero(at.owner).tolist()) == {s.row for s in running}, "a row without its sequence"
    for s in (s for request in scheduler.requests.values() for s in request.sequences):
        assert (s.row >= 0) == (s.status is Status.RUNNING), f"{s.order}: a row without running, or the reverse"
        assert 0 <= s.past <= s.length, f"{s.order}: {s.past} of {s.length} tokens cached"
        if s.status is not Status.FINISHED:
            assert s.known <= s.length <= min(s.known + 2, len(s.prompt) + s.limit), f"{s.order}: tokens miscounted"


def _check_names(scheduler: Scheduler) -> None:
    """A page is named by its own tokens and all before them, wherever they were taken from."""
    if scheduler.cache is None:
        return
    for s in (s for request in scheduler.requests.values() for s in request.sequences):
        if s.names is not None and s.status is not Status.FINISHED:
            again = scheduler.cache.names(s.request.cache_salt)
            again.extend(s.tokens(0, s.names.tokens))
            assert again.pages == s.names.pages, f"{s.order}: a page has the name of other tokens"


def _check_owners(scheduler: Scheduler) -> None:
    """Each live id is the cache's or one running sequence's."""
    placement, pool, rows = scheduler.placement, scheduler.pool, scheduler.running.rows
    private: dict[str, np.ndarray] = {}
    if "tokens" in pool.covering:
        which, columns = ragged(np.zeros_like(rows), placement.blocks.columns[rows])
        ids = placement.blocks.ids(rows[which], columns)
        ids = ids[ids > 0]
        private["tokens"] = ids if scheduler.cache is None else ids[~np.isin(ids, scheduler.cache.ids("tokens"))]
    if "states" in pool.covering:
        states = placement.states(rows)
        private["states"] = states[states > 0]
    if scheduler.cache is not None:
        scheduler.cache.check(private)
        return
    for space, ids in private.items():
        live = np.asarray(pool.ids(space).live_ids())
        assert np.array_equal(np.sort(ids), live), f"ids of {space!r}: {len(live)} live, {len(ids)} in block tables"


def check_step(scheduler: Scheduler, world: World, step: Step, *, oldest: Sequence | None) -> None:
    """Of a step that was just planned: limits are kept, and `oldest` (if it could run) is in it."""
    rows = step.rows.tolist()
    counts = np.diff(step.query_start)
    assert 1 <= len(step.tokens) <= world.max_num_batched_tokens, f"a step of {len(step.tokens)} tokens"
    assert len(rows) == len(set(rows)) <= world.max_num_seqs, f"a step of {len(rows)} rows"
    assert (counts > 0).all(), "a sequence without tokens is in the step"
    assert step.query_start[-1] == len(step.tokens), "the sequences do not cover the step's tokens"
    if oldest is not None:
        assert oldest.row in rows, f"the oldest sequence {oldest.order} is not in the step"
    if world.max_cached_tokens is not None and "tokens" in scheduler.pool.covering:
        pages = scheduler.pool.ids("tokens").live
        size = next(g.spec.page_size for g in world.groups if g.space == "tokens")
        assert pages <= world.max_cached_tokens // size, f"{pages} pages are over the cap on cached tokens"
    if step.plain:
        assert all(is_plain(s.params) and s.allow_eos for s in step.samples), "a plain step samples what is not"
    _check_passed(scheduler, step)


def _check_passed(scheduler: Scheduler, step: Step) -> None:
    """What a window has passed is not a sequence's own any more."""
    blocks, cache = scheduler.placement.blocks, scheduler.cache
    for name, group in scheduler.pool.groups.items():
        if group.kind != "window":
            continue
        dead = kind_of(group, keep_boundary=cache is not None).dead(step.past.astype(np.int64))
        which, columns = ragged(np.zeros_like(dead), np.minimum(dead, blocks.columns[step.rows]))
        ids = blocks.ids(step.rows[which].astype(np.int64), columns)
        if cache is not None:
            ids = ids[~np.isin(ids, cache.ids("tokens"))]
        held = scheduler.pool.is_bound(name, ids[ids > 0])
        assert not held.any(), f"{name}: {int(held.sum())} pages are held that no query can see"


def oldest_that_can_run(scheduler: Scheduler) -> Sequence | None:
    """The sequence that must be in the next step, whatever else is; None if the oldest waits for a flight or a row."""
    live = [s for r in scheduler.requests.values() for s in r.sequences if s.status is not Status.FINISHED]
    if not live:
        return None
    oldest = min(live, key=lambda s: s.order)
    running = oldest.status is Status.RUNNING
    if not running and len(scheduler.running) == scheduler.config.max_num_seqs:
        return None
    waits = oldest.has_pending and (not running or oldest.is_complete or looks_back(oldest.request.params))
    return None if waits else oldest


def check_receipt(request: Request, page_bytes: Mapping[str, int], seconds: float) -> None:
    """Of a request that has ended, in a run of so many seconds."""
    receipt, prompt = request.receipt, len(request.prompt_token_ids)
    assert receipt.prompt_tokens == prompt, "the receipt has another prompt"
    assert 0 <= receipt.cached_tokens <= min(receipt.known_tokens, prompt), "a hit is longer than what is known"
    computed = request.params.prompt_logprobs is None or not receipt.cached_tokens
    assert computed, "a prompt whose log probabilities are wanted was not computed"
    assert receipt.bytes == sum(n * page_bytes[name] for name, n in receipt.pages.items()), "bytes are not the pages'"
    waited = sum(receipt.waited_for.values())
    assert abs(receipt.waited_seconds - waited) < 1e-6, "what it waited for does not sum"
    assert 0 <= waited <= seconds * len(request.sequences), "it waited for longer than the run was"
    assert set(receipt.waited_for) <= {"rows", "budget", "memory", "prefix", "queue"}, "an unknown reason to wait"
