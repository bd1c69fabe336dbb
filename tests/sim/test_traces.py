"""Workloads in files and what is made of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from isthmus.errors import ConfigError
from isthmus.sim.arrivals import Arrival, Prompts, alternate, merged, scaled, synthetic
from isthmus.sim.traces import read
from isthmus.sim.workload import Workload
from tests.conftest import shared_file


def test_the_mooncake_trace_is_read_whole() -> None:
    trace = read(shared_file("mooncake_conversation_trace.jsonl"))
    assert len(trace) == 12_031
    assert trace[0] == Arrival(0.0, 6758, 500, tuple(range(14)), 512, 0)
    assert round(sum(a.input for a in trace) / len(trace)) == 12_035
    assert trace[-1].at == pytest.approx(3537, abs=1)


def test_the_azure_trace_is_read_whole() -> None:
    trace = read(shared_file("azure_llm_2023_conv.csv"))
    assert len(trace) == 19_366
    assert (round(trace[1].at, 6), trace[1].input, trace[1].output) == (4.314579, 396, 109)
    assert trace[-1].at == pytest.approx(3502, abs=1)


def test_any_csv_or_jsonl_with_three_columns_is_a_workload(tmp_path: Path) -> None:
    table, lines = tmp_path / "a.csv", tmp_path / "a.jsonl"
    table.write_text("output,arrival,input,blocks\n3,10.5,700,4 5\n1,10,20,\n")
    lines.write_text('{"arrival": 10.5, "input": 700, "output": 3, "blocks": [4, 5]}\n\n'
                     '{"arrival": 10, "input": 20, "output": 1}\n')  # fmt: skip
    expected = [Arrival(0.0, 20, 1, trace=2), Arrival(0.5, 700, 3, (4, 5), 512, 2)]
    assert read(table, trace=2) == read(lines, trace=2) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5}\n{nope}\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl:1: an object a line is due"),
        ("a.jsonl", '{"input": 5}\n', r"a\.jsonl:1: no fields of a workload.*timestamp.*TIMESTAMP.*arrival"),
        ("a.csv", "arrival,input,output\n0,5,5\n1,zero,5\n", r"a\.csv:3: input is 'zero', not a number of tokens"),
        ("a.csv", "arrival,input,output\n0,5\n", r"a\.csv:2: output is '', not a number of tokens"),
        ("a.csv", "arrival,input,output\nnan,5,5\n", r"a\.csv:2: arrival is nan, not a time"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nmonday,5,5\n", r"a\.csv:2: TIMESTAMP is 'monday', not"),
        ("a.csv", "arrival,input,output,blocks\n0,513,5,1\n", r"a\.csv:2: 1 blocks for 513 tokens: 2 of 512 are due"),
        ("a.csv", "arrival,input,output,blocks\n0,5,5,x\n", r"a\.csv:2: blocks is 'x', not a list of whole numbers"),
        ("a.csv", "arrival,input,output\n", r"a\.csv: the file has no requests"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: no such file"):
        read(tmp_path / "none.csv")


def every(period: float, count: int, trace: int) -> tuple[Arrival, ...]:
    return tuple(Arrival(i * period, 10, 1, trace=trace) for i in range(count))


def test_traces_take_turns_and_stand_still_in_between() -> None:
    played = alternate([every(4, 6, 0), every(5, 3, 1)], 10)
    assert [(a.at, a.trace) for a in played] == [
        (0, 0), (4, 0), (8, 0),  # its first 10 s
        (10, 1), (15, 1),
        (22, 0), (26, 0),  # its next: 12 and 16
        (30, 1),
        (40, 0),  # 20; the other has ended, and is passed over from here on
    ]  # fmt: skip


def test_a_turn_without_arrivals_takes_its_time() -> None:
    late = (Arrival(0, 1, 1), Arrival(25, 1, 1))
    played = alternate([late, every(1, 1, 1)], 10)
    assert [(a.at, a.trace) for a in played] == [(0, 0), (10, 1), (35, 0)]


def test_traces_at_once_are_in_the_order_of_time() -> None:
    assert [a.at for a in merged([every(4, 3, 0), every(5, 2, 1)])] == [0, 0, 4, 5, 8]


def test_a_rate_moves_arrivals_together() -> None:
    assert [a.at for a in scaled([Arrival(10, 1, 1), Arrival(30, 1, 1)], 4)] == [0, 5]


def test_synthetic_requests_are_the_same_for_the_same_seed() -> None:
    shapes = [(3, 100, 10), (2, 7, 3)]
    first = synthetic(shapes, 2.0, 1)
    assert first == synthetic(shapes, 2.0, 1) != synthetic(shapes, 2.0, 2)
    assert sorted((a.input, a.output) for a in first) == [(7, 3)] * 2 + [(100, 10)] * 3
    assert all(a.at == 0 for a in synthetic(shapes, None, 1))


def test_a_sample_has_turns_of_every_trace() -> None:
    workload = Workload(("a", "b"), (every(1, 500, 0), every(2, 500, 1)), 300)
    sample = workload.sample(40)
    order = [a.trace for a in sample.arrivals()]
    assert order.count(0) == order.count(1) == 20
    assert sum(a != b for a, b in pairwise(order)) >= 3, "two turns of each at least"
    assert workload.sample(1000) == workload, "that is all of it"
    assert Workload(("a", "b"), workload.traces, 300, 300).only(0).arrivals() == list(workload.traces[0][:300])


def test_prompts_have_in_common_what_their_blocks_have() -> None:
    prompts = Prompts()
    one = prompts.tokens(Arrival(0, 1000, 1, (7, 8), 512))
    same = prompts.tokens(Arrival(0, 600, 1, (7, 8), 512))
    fork = prompts.tokens(Arrival(0, 1000, 1, (7, 9), 512))
    other = prompts.tokens(Arrival(0, 1000, 1, (7, 8), 512, trace=1))
    alone, also = (prompts.tokens(Arrival(0, 1000, 1)) for _ in range(2))
    assert len(one) == 1000
    assert same == one[:600]
    assert fork[:512] == one[:512]
    assert fork[512] != one[512]
    assert len({tokens[0] for tokens in (one, other, alone, also)}) == 4
