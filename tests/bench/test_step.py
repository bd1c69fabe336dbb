"""Decode steps in parts: every figure is there, the bytes are exact, and what cannot run says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.bench.step import cache_bytes
from isthmus.bench.trace import Event, Trace, class_of, device_events
from isthmus.memory import Group, LayerKV, kv_spec, state_spec
from isthmus.model.cost import ForwardCost
from tests.command import refusal, run
from tests.model.tiny_gguf import tiny_model

SMALL = ("--dtype", "float32", "--pool-bytes", "300k", "--page-size", "4")


def test_all_figures_on_a_cpu(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "bench", "step", gguf, *SMALL, "--batch", "1,3", "--context", 20, "--steps", 4, "--device", "cpu", "--json"
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    result = json.loads(captured.out)
    parameters = sum(p.nbytes for p in tiny_model("gemma3").parameters())
    assert result["weight_bytes"] == parameters
    assert result["copy_bytes_per_second"] > 0
    assert [one["batch"] for one in result["batches"]] == [1, 3]
    for one in result["batches"]:
        assert len(one["wall_ms"]["samples"]) == 4
        host = {name: part["samples"] for name, part in one["host_ms"].items()}
        assert set(host) == {"schedule", "launch", "settle", "total"}
        for *parts, total in zip(host["schedule"], host["launch"], host["settle"], host["total"], strict=True):
            assert min(parts) > 0
            assert sum(parts) == pytest.approx(total, abs=1e-3)
        assert one["gpu"] is one["gpu_over_floor"] is None
        assert one["floor_ms"] == pytest.approx(
            (parameters + one["kv_bytes"]) / result["copy_bytes_per_second"] * 1e3, abs=1e-3
        )
    assert result["batches"][1]["kv_bytes"] > 2 * result["batches"][0]["kv_bytes"]
    assert run("bench", "step", gguf, *SMALL, "--batch", "2", "--context", 20, "--steps", 2, "--device", "cpu") == 0
    assert "milliseconds" in capsys.readouterr().out


def test_a_window_bounds_what_is_read() -> None:
    full = Group("full", kv_spec([LayerKV(0, 2, 16, 8)], 4), "append")
    window = Group("window", kv_spec([LayerKV(1, 1, 16, 16), LayerKV(2, 1, 16, 16)], 4), "window", 10)
    assert cache_bytes([full], [7, 30]) == 37 * 2 * (16 + 8) * 2
    assert cache_bytes([window], [7, 30]) == (7 + 10) * 2 * 32 * 2


def test_states_are_read_and_written_whatever_the_lengths() -> None:
    state = Group("state", state_spec([("0.x", (3, 5), "float32")]), "state")
    assert cache_bytes([state], [7, 30, 1]) == 3 * 2 * state.spec.page_bytes


def test_a_step_reads_the_experts_of_its_tokens() -> None:
    cost = ForwardCost(1, 100, 800, 8, 2, 0.0, 0.0, {}, 4)
    assert cost.weight_bytes(1) == 300
    assert cost.weight_bytes(2) == 100 + 800 * 7 / 16
    assert ForwardCost(1, 100, 0, 1, 1, 0.0, 0.0, {}, 4).weight_bytes(9) == 100


BAD = {
    "no steps": (["--steps", "0"], "--steps"),
    "batches that are no numbers": (["--batch", "1,x"], "'1,x'"),
    "more sequences than rows": (["--batch", "9", "--max-num-seqs", "4"], "--max-num-seqs"),
    "a context beyond the model's": (["--batch", "1", "--context", "120"], "--context"),
    "more than the arena holds": (["--batch", "40", "--context", "30", "--steps", "4"], "raise --pool-bytes"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line(case: str, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = BAD[case]
    code = run("bench", "step", gguf, *SMALL, "--device", "cpu", *arguments)
    assert named in refusal(code, *capsys.readouterr())


def test_kernels_are_sorted_into_classes() -> None:
    names = {
        "decode_kernel": "attention",
        "prefill_kernel": "attention",
        "_delta_kernel": "states",
        "_conv_outputs_kernel": "states",
        "_chunks_kernel": "states",
        "_solve_kernel": "states",
        "_walk_kernel": "states",
        "_plan_kernel": "routing",
        "_top_k_kernel": "routing",
        "_few_rows_linear_kernel": "matrix products",
        "_write_kernel": "cache writes",
        "_translate_kernel": "tables and moves",
        "_copy_kernel": "tables and moves",
        "nvjet_tst_192x128_64x3_2x1_v_bz_TNT": "matrix products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "matrix products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>": "matrix products",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "elementwise and norms",
        "void at::native::vectorized_gather_kernel<16, int>": "elementwise and norms",
        "_survey_kernel": "sampling",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>": "sampling",
        "Memcpy HtoD (Pinned -> Device)": "other",
    }
    assert {name: class_of(name) for name in names} == names


@pytest.mark.parametrize("sort", ["poi", "per", "red"])
@pytest.mark.parametrize("between", ["gelu_linear_mul_split", "add_attend_cat_mean_rsqrt", "softmax_topk_linear"])
def test_fused_kernels_are_not_the_operators_they_stand_between(sort: str, between: str) -> None:
    assert class_of(f"triton_{sort}_fused__to_copy_{between}_3") == "elementwise and norms"


def test_a_trace_counts_time_once_and_only_the_gpu() -> None:
    entries: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": "decode_kernel", "ts": 0.0, "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "nvjet", "ts": 5.0, "dur": 10.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 20.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "a whole layer", "ts": 0.0, "dur": 100.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 3.0},
        {"ph": "M", "cat": "kernel", "name": "process_name"},
    ]
    events = device_events(entries)
    assert [event.name for event in events] == ["decode_kernel", "nvjet", "Memcpy DtoH"]
    trace = Trace([*events, Event("decode_kernel", 30.0, 2.0)])
    assert trace.busy_us == 15 + 1 + 2
    assert {kind: us for kind, us in trace.by_class().items() if us} == {
        "attention": 12.0, "matrix products": 5.0, "other": 1.0,
    }, "while two ran, the first did"  # fmt: skip
    assert trace.top(1) == [{"name": "decode_kernel", "class": "attention", "calls": 2, "us": 12.0}]


@pytest.mark.gpu
def test_all_figures_on_a_gpu(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "bench", "step", gguf, "--dtype", "bfloat16", "--pool-bytes", "8m", "--batch", "1,3", "--context", 20,
        "--steps", 4, "--max-num-seqs", 8, "--device", "cuda", "--json",
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    for one in json.loads(captured.out)["batches"]:
        gpu = one["gpu"]
        assert len(gpu["span_ms"]["samples"]) == 4
        assert gpu["by_class_ms"]["attention"] > 0
        assert gpu["by_class_ms"]["matrix products"] > 0
        assert 0 < gpu["busy_ms"] <= sum(gpu["by_class_ms"].values()) + 1e-3
        assert one["gpu_over_floor"] > 0


def test_a_summary_is_by_step() -> None:
    trace = Trace([Event("nvjet", 0.0, 6.0), Event("decode_kernel", 4.0, 4.0), Event("nvjet", 9.0, 6.0)])
    found = trace.summary(2, 1)
    assert found["busy_ms"] == sum(found["by_class_ms"].values()) == 7e-3
    assert found["by_class_ms"]["attention"] == 1e-3
    assert found["kernels"] == [{"name": "nvjet", "class": "matrix products", "calls": 1.0, "ms": 6e-3}]
