"""`--check-memory` from the command line to metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import ConfigError
from isthmus.flags import Parser, add_engine_flags, as_flags, engine_args
from isthmus.llm import LLM
from isthmus.params import SamplingParams
from isthmus.server.dashboard_frame import pool_json
from isthmus.server.metrics import Metrics
from isthmus.server.worker import stats
from tests.server.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ([], None),
        (["--check-memory"], "audit"),
        (["--check-memory=audit"], "audit"),
        (["--check-memory=full"], "full"),
        (["--check-memory", "full"], "full"),
        (["--check-memory", "--page-size", "4"], "audit"),
    ],
)
def test_the_flag_alone_means_the_audit(line: list[str], mode: str | None) -> None:
    parser = Parser()
    add_engine_flags(parser)
    args = engine_args(parser.parse_args(["demo", *line]))
    assert args.get("check_memory") == mode
    again = engine_args(parser.parse_args(as_flags(args)))
    assert again == args


def test_another_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    add_engine_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["demo", "--check-memory=some"])
    assert "--check-memory: invalid choice: 'some'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^--check-memory must be one of off, audit, full"):
        LLM("demo", check_memory="some")


@pytest.mark.parametrize("mode", ["audit", "full"])
def test_faults_are_counted_and_told(tmp_path: Path, mode: str) -> None:
    """Whatever an engine found stands in `/v1/pool` and in the metrics, and the arena sums with what is fenced."""
    llm = LLM(
        str(write_tiny_model(tmp_path)), device="cpu", dtype="float32", page_size=4, pool_bytes=1 << 20,
        max_num_seqs=4, max_num_batched_tokens=32, check_memory=mode,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = llm.generate("the cat sat on the mat", params, use_tqdm=False)[0].outputs[0].text
    pool: Any = llm.engine.pool
    leaked = pool.plan(dict.fromkeys(pool.groups, 1))
    pool.commit(leaked, {name: leaked.ids["tokens"] for name in pool.groups if name not in pool.covering["tokens"]})
    assert llm.generate("the cat sat on the mat", params, use_tqdm=False)[0].outputs[0].text == before
    seen = stats(llm.engine, 0)
    metrics = Metrics(lambda: seen)
    assert metrics.registry.get_sample_value("isthmus:memory_faults_total", {"kind": "leak"}) == 1
    assert metrics.registry.get_sample_value("isthmus:fenced_pages") == len(pool.groups)
    shown = pool_json(seen)
    assert (shown["memory_faults"], shown["fenced_pages"]) == ({"leak": 1}, len(pool.groups))
    pool.check()
