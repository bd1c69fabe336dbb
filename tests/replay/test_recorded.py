"""What engines record replays on a machine without their device, and says whose the pages were."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.cli import main
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.recorder import Recorder
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Request
from isthmus.errors import ConfigError
from isthmus.llm import LLM
from isthmus.memory import Journal, Pool, Replay
from isthmus.memory.snapshot import state_of
from isthmus.params import SamplingParams
from tests.command import refusal, run
from tests.engine.scripted import ScriptedExecutor
from tests.engine.test_device_runner import ENDLESS, GEMMA, engine_on, on_device, random_prompts, serve
from tests.memory.helpers import groups_of
from tests.model.harness import tiny
from tests.server.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def build(folder: Path, **changes: Any) -> LLM:
    settings = {"dtype": "float32", "pool_bytes": 1 << 20, "page_size": 4, "max_num_seqs": 8}
    return LLM(str(folder), **settings | changes)


def recorded(engine: Engine, journal: Journal) -> Engine:
    engine.executor = Recorder(engine.executor, engine.scheduler.running, journal)
    return engine


def same_state(a: Pool, b: Pool) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(state_of(a), state_of(b), strict=True))


def test_a_journal_of_the_gpu_engine_replays_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Chunks, decodes, preemption and moved pages through the device's executor, which runs a step behind."""
    path = tmp_path / "a.journal"
    journal = Journal(path)
    monkeypatch.setattr("tests.engine.test_device_runner.Pool", functools.partial(Pool, journal=journal))
    values: dict[str, Any] = GEMMA
    model = on_device(tiny("gemma3_text", **values), device, compiled=False)
    engine = recorded(engine_on(device, model, arena_bytes=32 << 10), journal)
    looked = 0

    def look(steps: int) -> None:
        nonlocal looked
        engine.pool.compact()
        if steps == 3:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        looked += require_owners(engine, journal)

    params = SamplingParams(max_tokens=5, **ENDLESS)
    serve(engine, [(prompt, params) for prompt in random_prompts(17, 9, 1)], look)
    assert looked > 20
    steps = engine.scheduler.counters.steps
    journal.close()

    life = Replay(path)
    for _ in life:
        life.pool.check()
    assert same_state(life.pool, engine.pool)
    assert sum(life.pool.moved_pages.values()) > 0
    assert life.step == steps
    for space, of in journal.owners.of.items():
        live = np.asarray(life.pool.ids(space).live_ids())
        assert np.array_equal(life.owners.of[space][live], of[live])
    assert set(life.owners.names.values()) == set("012")
    assert main(["replay", str(path), "--html", str(tmp_path / "x.html"), "--png", str(tmp_path / "x.png")]) == 0


def require_owners(engine: Engine, journal: Journal) -> int:
    """The ids in the block table of every running sequence are its own; how many there were."""
    blocks, seen = engine.scheduler.placement.blocks, 0
    for sequence in engine.scheduler.running:
        columns = np.arange(blocks.columns[sequence.row])
        ids = blocks.ids(np.full(len(columns), sequence.row), columns)
        ids = ids[ids > 0]
        names = {journal.owners.names[number] for number in journal.owners.of["tokens"][ids].tolist()}
        assert names <= {sequence.request.request_id}
        seen += len(ids)
    return seen


def test_an_offline_batch_is_recorded(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    llm = build(folder, journal=str(path), max_num_seqs=3, pool_bytes=1 << 15)
    assert "a.journal, the newest 67,108,864 bytes" in llm.certificate()
    llm.generate(["one two", "three", "four"], SamplingParams(n=2, max_tokens=12, ignore_eos=True), use_tqdm=False)
    life = Replay(path)  # while it is being written
    for _ in life:
        life.pool.check()
    assert same_state(life.pool, llm.engine.pool)
    assert life.header["about"]["model"] == str(folder)
    assert sorted(life.owners.names.values()) == sorted(f"{i} #{k}" for i in range(3) for k in range(2))
    with pytest.raises(ConfigError, match="a --journal is the life of one pool"), llm.static([(5, 5)]):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"journal": "/none/a"}, "--journal /none/a: no such file"),
        ({"journal": ""}, "--journal must be a file"),
        ({"journal_bytes": 1 << 20}, "--journal-bytes must be left out unless"),
        ({"journal": "a", "journal_bytes": 4096}, "--journal a: a pool of this size needs a journal of [0-9,]+ bytes"),
    ],
)
def test_a_wrong_journal_is_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        build(folder, **settings)
    assert "\n" not in str(caught.value)


def test_two_pools_do_not_share_a_journal(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("generate", folder, "--prompt", "x", "--compare-static", "--journal", tmp_path / "a")
    assert "a journal is the life of one: leave out --journal" in refusal(code, *capsys.readouterr())
    assert not list(tmp_path.iterdir())


def test_states_are_owned_too(tmp_path: Path) -> None:
    """A model with recurrent layers: each running sequence's state page is its own."""
    journal = Journal(tmp_path / "a.journal")
    pool = Pool(4000 * 16, groups_of({"state": 40, "full": 2}, page_size=4), journal=journal)
    scheduler = Scheduler(pool, SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16), max_model_len=64)
    executor = Recorder(ScriptedExecutor(pool, 3), scheduler.running, journal)
    for i in range(5):
        scheduler.add(Request(f"r{i}", list(range(1, 9 + i)), SamplingParams(max_tokens=3 + i, ignore_eos=True)))
    seen = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        launched = executor.launch(step)
        for sequence in scheduler.running:
            ids = scheduler.placement.states(np.array([sequence.row]))
            if ids[0]:
                number = int(journal.owners.of["states"][ids[0]])
                assert journal.owners.names[number] == sequence.request.request_id
                seen += 1
        scheduler.settle(step, launched.wait())
    assert seen > 10
