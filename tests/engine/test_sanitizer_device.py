"""Faults of the device: tables that differ from what it was told, results that are no numbers. With the CPU's executor,
and one with the GPU's."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.sanitizer import GuardedPool
from isthmus.kernels import reference as kernels
from isthmus.memory import Group
from isthmus.model.layout import derive
from tests.engine.sanitized import LONGEST, MODEL, PAGE, ROWS, build, ids_of, place, sequence_of, serve
from tests.engine.sanitized_case import Case, Truth, told
from tests.engine.test_device_runner import on_device, random_prompts
from tests.model.harness import reference, tiny
from tests.server.faulty_worker import ShortMirror


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth.of()


@pytest.fixture(params=[False, True], ids=["one at a time", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def case(truth: Truth, caplog: pytest.LogCaptureFixture, overlap: bool) -> Case:
    return Case(truth, caplog, overlap=overlap)


# -- the device ------------------------------------------------------------------------------------------------


def test_a_table_shorter_than_its_ids(truth: Truth, caplog: pytest.LogCaptureFixture, overlap: bool) -> None:
    """The founding bug: right on a fresh server; once ids pass the window's own pages, everyone they go to is named."""
    case = Case(truth, caplog, overlap=overlap, arena_bytes=112 << 10)
    mirror = case.runner.mirrors["window"]
    short = ShortMirror(case.runner.arena, mirror.group, len(mirror.table) - 1, True)
    case.runner.mirrors["window"] = short
    own = short.num_pages
    assert own < case.engine.pool.ids("tokens").capacity
    fresh = case.serve()
    assert {name: output.token_ids for name, output in fresh.items()} == truth.wanted
    assert not case.reports
    outputs = case.serve()
    for name, output in outputs.items():
        assert output.token_ids == truth.wanted[name][: len(output.token_ids)], "nothing wrong goes out"
    assert {output.finish_reason for output in outputs.values()} == {"abort", "length"}
    report = case.reports[0]
    assert report.startswith("memory fault (table): the device translates otherwise than it was told")
    told(report, group="window, layers 0-1", found="the table of window on the device has page")
    found = re.search(r"virtual id (\d+)", report)
    assert found is not None
    assert int(found[1]) >= own - 1


def test_a_wrong_table_entry(case: Case) -> None:
    """A sequence reads and writes another's page. What either of them computes from there on is not handed out."""
    seen: list[int] = []

    def spoil() -> None:
        mine, theirs = case.ids("a")[-1], case.ids("c")[0]
        table = case.runner.mirrors["full"].table
        seen.extend((mine, int(table[mine]), int(table[theirs])))
        table[mine] = table[theirs]

    report = case.plant(8, spoil, "ac")
    virtual, page, wrong = seen
    assert report.startswith("memory fault (table)")
    told(report, request="'a', 'c'", group="full, layer 2", page=f"page {page} (virtual id {virtual})")
    told(report, found=f"has page {wrong} for id {virtual}, which has page {page}", done=f"is fenced with id {virtual}")
    assert case.is_fenced_id(virtual), "nobody gets the id, which the device has a wrong page for"


def test_a_wrong_entry_of_the_block_table(case: Case) -> None:
    def spoil() -> None:
        case.runner.blocks[sequence_of(case.engine, "a").row, 1] = case.ids("c")[1]

    report = case.plant(8, spoil, "ac")
    told(report, request="'a'", found="the block table on the device has id")


# -- numbers ---------------------------------------------------------------------------------------------------


def test_nan_in_a_page_names_page_and_layer(case: Case) -> None:
    seen: list[int] = []

    def spoil() -> None:
        virtual = case.ids("a")[4]
        page = case.place("window", virtual)
        seen.append(page)
        spec = case.engine.pool.groups["window"].spec
        part = spec.part("1.k")
        case.runner.arena[page * spec.page_bytes + part.offset :][: part.nbytes].fill_(0xFF)

    report = case.plant(8, spoil, "a")
    told(report, request="'a'", group="window, layers 0-1", found=f"reads page {seen[0]}, where layer 1 holds what")
    assert case.is_fenced("window", seen[0])


def test_nan_past_the_end(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel forgets to mask what lies past the end of one sequence, where the poison is."""
    group_batch, armed = kernels.group_batch, list[bool]()

    def unmasked(group: Group, *args: Any, **more: Any) -> Any:
        batch = group_batch(group, *args, **more)
        if not armed or group.name != "full":
            return batch
        bucket = batch.buckets[0]
        assert bucket.hidden is not None
        assert bucket.foreign is not None
        length, hidden, foreign = bucket.hidden.shape[-1], bucket.hidden.clone(), bucket.foreign
        victim = armed_row(batch)
        hidden[victim] = False
        kept = foreign[foreign // length != victim]
        return dataclasses.replace(batch, buckets=(dataclasses.replace(bucket, hidden=hidden, foreign=kept),))

    def armed_row(batch: Any) -> int:
        rows = case.engine.scheduler.running.rows.tolist()
        token = rows.index(sequence_of(case.engine, "a").row)
        return int(batch.buckets[0].tokens.tolist().index(token))

    monkeypatch.setattr("isthmus.engine.runner.group_batch", unmasked)

    def arm() -> None:
        if sequence_of(case.engine, "a").past % PAGE != PAGE - 1:
            armed.append(True)

    def between(step: int) -> None:
        armed.clear()
        if step >= 8 and not case.reports and "a" in case.engine.scheduler.requests:
            arm()

    outputs = case.serve(between)
    armed.clear()
    report = case.judge(outputs, "a")
    assert report.startswith("memory fault (nan): the results of a sequence are no numbers")
    told(report, request="'a'", found="all of them numbers: it read past its end")


# -- the executor of a GPU -------------------------------------------------------------------------------------

SHORT = dict(zip("ab", random_prompts(9, 3), strict=True))
FEW = 4
SMALL = {**MODEL, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return tiny("gemma3_text", **SMALL)


@pytest.fixture(scope="module")
def wanted(small: PreTrainedModel) -> dict[str, list[int]]:
    return {name: reference(small, prompt, FEW) for name, prompt in SHORT.items()}


def test_a_wrong_entry_on_a_device_is_named_and_the_others_are_right(
    device: str, small: PreTrainedModel, wanted: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """An entry of the page table is overwritten on the device while a step is out."""
    caplog.set_level(logging.ERROR, "isthmus")
    twin = on_device(small, device, compiled=False)
    layout = derive(twin, PAGE, "float32")
    pool = GuardedPool(1 << 16, layout.groups)
    arena = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    runner = DeviceRunner(
        twin, layout, arena, pool.capacities, ROWS, 24, LONGEST, (), graphs={}, poison=True, early=True
    )
    engine = build(pool, runner, layout.vocab_size)
    seen: list[int] = []

    def plant(step: int) -> None:
        if step != 2:
            return
        virtual = ids_of(engine, "a")[1]
        seen.extend((virtual, place(engine, "window", virtual)))
        runner._table[runner._tables.at["window"] + virtual] = 0

    outputs = serve(engine, SHORT, FEW, plant)
    assert outputs["b"].token_ids == wanted["b"]
    assert outputs["a"].finish_reason == "abort"
    assert outputs["a"].token_ids == wanted["a"][: len(outputs["a"].token_ids)]
    virtual, page = seen
    report = caplog.records[0].getMessage()
    assert report.startswith("memory fault (table)")
    told(report, request="'a'", group="window, layer 0", page=f"page {page} (virtual id {virtual})")
    told(report, found=f"has page 0 for id {virtual}", done=f"page {page} is fenced with id {virtual}")
    assert pool.fenced["tokens"][virtual]
    assert engine.sanitizer is not None
    assert dict(engine.sanitizer.faults) == {"table": 1}
