"""What `isthmus plan` says is what the engine does: figure by figure, and as published for known models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli import main
from isthmus.engine import capacity
from isthmus.engine.config import EngineConfig, SchedulerConfig
from isthmus.engine.dryrun import dry_steps
from isthmus.llm import LLM
from isthmus.memory import Pool
from isthmus.model.source import resolve
from isthmus.plan import ranks
from isthmus.plan.budget import RESERVE
from isthmus.plan.gpus import GPUS
from isthmus.plan.shape import Shape, load
from tests.command import refusal, run
from tests.server.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the verb with `--json` and return what it prints."""

    def run(*args: object) -> Any:
        assert main(["plan", *map(str, args), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def shape(model: str, ranks: int = 1, **settings: Any) -> Shape:
    return load(EngineConfig.build(model=model, **settings), ranks)


# -- the engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"memory": "static"},
        {"memory": "static", "static_split": {"full": 0.7, "window": 0.3}},
        {"page_size": 4, "max_total_tokens": 300, "kv_cache_dtype": "bfloat16"},
        {"max_model_len": 100, "max_num_seqs": 3},
    ],
)
def test_the_engine_has_every_figure(tiny: Path, plan: Any, settings: dict[str, Any]) -> None:
    """A CPU engine is started with the same settings, and asked."""
    settings = {"pool_bytes": 200_000, **settings}
    flags = [f"--{name.replace('_', '-')}={_text(value)}" for name, value in settings.items()]
    found = plan(tiny, *flags)
    llm = LLM(str(tiny), device="cpu", **settings)
    pool, scheduler = llm.engine.pool, llm.engine.scheduler
    side = found[found["memory"]]

    assert found["budget"]["arena_bytes"] == pool.arena_bytes
    assert found["null_bytes"] == pool.null_bytes
    assert found["max_model_len"] == scheduler.max_model_len
    assert found["context"] == llm.layout.max_model_len
    assert found["dtype"] == "float32"
    assert side["walls"] == pool.walls
    assert found["unified"]["walls"] is None
    assert side["ids"] == {name: space.capacity for name, space in pool.spaces.items()}
    assert side["page_tables"] == {name: pool.table(name).entries.nbytes for name in pool.groups}
    groups = {group["name"]: group for group in found["groups"]}
    assert list(groups) == [group.name for group in llm.layout.groups]
    for name, group in pool.groups.items():
        assert groups[name]["page_bytes"] == group.spec.page_bytes
        assert groups[name]["page_tokens"] == group.spec.page_size
        assert groups[name]["window"] == group.window
        assert groups[name]["pages"] == pool.num_pages(name)
    certificate = llm.certificate()
    for fit in side["fits"]:
        assert f"{fit['sequences']:,} sequences of {fit['tokens']:,} tokens fit together" in certificate
    assert f"{side['tokens']:,} tokens fit in sequences of up to {found['max_model_len']:,}" in certificate
    assert f"{sum(side['page_tables'].values()):,} bytes" in certificate
    assert found["budget"]["weight_bytes"] == resolve(str(tiny)).weight_bytes


def _text(value: object) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


# -- published figures --------------------------------------------------------------------------------------


def test_gemma_4_31b_on_two_ranks(plan: Any) -> None:
    found = plan("gemma-4-31b-it", "-tp", 2, "--page-size", 1, "--pool-bytes", 84_607_000_000)
    full, window = found["groups"]
    assert (full["token_bytes"], window["token_bytes"]) == (40_960, 409_600)
    assert (full["layers"], window["layers"], window["window"]) == (10, 50, 1024)
    assert (full["pages"], window["pages"]) == (2_065_600, 206_560)
    # Ten pages of the full group lie where the null pages are; one entry more, for the null page's id.
    assert found["unified"]["ids"] == {"tokens": 2_065_590}
    assert found["unified"]["page_tables"] == {"full": 4 * 2_065_591, "window": 4 * 2_065_591}
    assert found["block_table_bytes"] == 4 * 256 * 262_144
    assert "planned for 2 ranks" in found["notes"][0]


def test_gemma_4_e2b_with_every_layer_counted_and_with_shared_rows_stored_once(plan: Any) -> None:
    size = 108_613_048_320
    layout = shape("gemma-4-E2B-it", page_size=1).layout
    full, window = ranks.every_layer(layout).values()
    assert (full.spec.token_bytes, window.spec.token_bytes) == (14_336, 28_672)
    counted = Pool(size, [full, window])
    assert (counted.num_pages("full"), counted.num_pages("window")) == (7_576_245, 3_788_122)
    assert [counted.table(name).entries.nbytes for name in ("full", "window")] == [4 * 7_576_244] * 2

    found = plan("gemma-4-e2b-it", "--pool-bytes", size)
    assert [group["token_bytes"] for group in found["groups"]] == [6_144, 12_288]
    assert [(group["layers"], group["sharing"]) for group in found["groups"]] == [(3, 4), (12, 16)]
    assert [round(group["every_layer"], 2) for group in found["groups"]] == [2.33, 2.33]
    every = Pool(size, list(ranks.every_layer(shape("gemma-4-E2B-it").layout).values()))
    assert found["unified"]["tokens"] / capacity.total_tokens(every, 131_071) == pytest.approx(2.33, abs=0.01)


def test_gpt_oss_20b_has_equal_sides(plan: Any) -> None:
    found = plan("gpt-oss-20b", "--page-size", 1, "--pool-bytes", "24m")
    full, window = found["groups"]
    assert full["token_bytes"] == window["token_bytes"] == 24_576
    assert (full["layers"], window["layers"], window["window"]) == (12, 12, 128)
    assert full["pages"] == window["pages"] == 1024
    assert found["unified"]["page_tables"] == {"full": 4 * 1024, "window": 4 * 1024}
    assert "MXFP4" in found["notes"][0]


# -- memory -------------------------------------------------------------------------------------------------


def test_the_arena_is_what_a_gpu_has_less_weights_and_reserve(plan: Any) -> None:
    money = plan("gemma-3-1b", "--gpu", "H200", "--gpu-memory-utilization", 0.8)["budget"]
    used = int(GPUS["h200"].memory_bytes * 0.8)
    assert money["weight_bytes"] == 2 * 999_885_952
    assert money["arena_bytes"] == (used - money["weight_bytes"] - RESERVE) // 16 * 16
    assert "assumed" in money["reserve_source"]

    money = plan("gemma-3-1b", "--gpu", "24g", "--weights", "1g", "--reserve", "512m", "-tp", 2)["budget"]
    assert money["weight_bytes"] == 512 << 20
    assert money["arena_bytes"] == (int((24 << 30) * 0.9) - (1 << 30)) // 16 * 16
    assert money["reserve_source"] == "as given"


def test_a_gpu_with_a_given_arena(plan: Any) -> None:
    money = plan("gemma-3-1b", "--gpu", "l4", "--pool-bytes", "2g")["budget"]
    assert (money["arena_bytes"], money["arena_source"]) == (2 << 30, "--pool-bytes")


def test_what_fits_is_exact_and_says_what_is_in_the_way(plan: Any) -> None:
    found = plan("gemma-3-4b", "--pool-bytes", "8g", "--max-num-seqs", 64)
    groups = shape("gemma-3-4b").layout.groups
    walls = found["static"]["walls"]
    assert found["static_for"] == "prompts of 1,024 and outputs of 256"
    for side, pool in (("unified", Pool(8 << 30, groups)), ("static", Pool(8 << 30, groups, walls=walls))):
        for fit in found[side]["fits"]:
            assert capacity.fits(pool, fit["tokens"], fit["sequences"])
            assert not capacity.fits(pool, fit["tokens"], fit["sequences"] + 1)
            assert sum(fit["bytes"].values()) <= 8 << 30
    assert [fit["tokens"] for fit in found["unified"]["fits"]] == [1024, 8192, 32768, 131_071]
    assert [fit["binds"] for fit in found["unified"]["fits"]] == ["bytes"] * 4
    assert [fit["binds"] for fit in found["static"]["fits"]][-1] == "wall of full"
    assert plan("gemma-3-4b", "--pool-bytes", "8g", "--max-num-seqs", 32)["unified"]["fits"][0]["binds"] == (
        "--max-num-seqs 32"
    )
    capped = plan("gemma-3-4b", "--pool-bytes", "8g", "--max-total-tokens", "40k")
    assert [fit["binds"] for fit in capped["unified"]["fits"]] == ["--max-total-tokens 40960"] * 4
    assert capped["unified"]["tokens"] <= 40_960


def test_bytes_follow_the_type_of_the_cache(plan: Any) -> None:
    half, whole = (plan("gemma-3-1b", "--kv-cache-dtype", dtype)["groups"] for dtype in ("fp8", "bfloat16"))
    assert [2 * group["page_bytes"] for group in half] == [group["page_bytes"] for group in whole]


def test_ranks_split_heads_until_each_has_one(plan: Any) -> None:
    """Four key heads on two ranks are two each, on eight they are one each, four times over; three does not divide."""
    bytes_of = {n: plan("gemma-3-4b", "-tp", n)["groups"][0]["token_bytes"] for n in (1, 2, 4, 8)}
    assert bytes_of == {1: 20_480, 2: 10_240, 4: 5_120, 8: 5_120}


@pytest.mark.parametrize("model", ["LFM2-1.2B", "Qwen3.5-0.8B", "Nemotron-H-8B"])
def test_ranks_split_the_heads_and_channels_of_states(model: str) -> None:
    one, two = (shape(model, n).layout.groups[-1] for n in (1, 2))
    assert one.kind == two.kind == "state"
    assert two.spec.page_bytes * 2 == one.spec.page_bytes


def test_states_are_planned_beside_tokens(plan: Any) -> None:
    found = plan("Qwen3.5-0.8B", "--pool-bytes", "2g", "--max-num-seqs", 64)
    full, state = found["groups"]
    assert (state["kind"], state["layers"], state["token_bytes"], state["page_tokens"]) == ("state", 18, None, None)
    assert state["sequence_bytes"] == state["page_bytes"]
    assert set(found["unified"]["ids"]) == {"tokens", "states"}
    assert found["block_table_bytes"] == 4 * 64 * -(-found["max_model_len"] // 16)
    short = found["unified"]["fits"][0]
    assert short["bytes"] == {
        "full": short["sequences"] * 64 * full["page_bytes"],
        "state": short["sequences"] * state["page_bytes"],
    }


# -- workloads ----------------------------------------------------------------------------------------------

MIX = ("--workload", "6,400,40", "--workload", "40,16,40")


def test_a_dry_run_compares_unified_memory_with_the_best_walls(tiny: Path, plan: Any) -> None:
    found = plan(tiny, "--pool-bytes", 200_000, *MIX)
    batch, groups = found["batch"], shape(str(tiny)).layout.groups
    lengths = [(400, 40)] * 6 + [(16, 40)] * 40
    assert (batch["requests"], batch["output_tokens"]) == (46, 40)
    assert batch["prompt_tokens"] == pytest.approx((6 * 400 + 40 * 16) / 46)
    assert batch["unified_running"] == pytest.approx(46 * 40 / batch["unified_steps"])
    assert batch["gain"] == pytest.approx(batch["static_steps"] / batch["unified_steps"])
    arithmetic = Pool(200_000, groups, walls=capacity.best_walls(groups, 200_000, lengths))
    assert batch["static_steps"] <= dry_steps(arithmetic, SchedulerConfig(), _spread(lengths))
    best = Pool(200_000, groups, walls=batch["static_walls"])
    assert batch["static_steps"] == dry_steps(best, SchedulerConfig(), _spread(lengths))
    assert batch["unified_steps"] == dry_steps(Pool(200_000, groups), SchedulerConfig(), _spread(lengths))
    assert found["static"]["walls"] == capacity.best_walls(groups, 200_000, lengths)


def _spread(lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both kinds of request evenly among each other."""
    places = [((i + 0.5) / 6, 0) for i in range(6)] + [((i + 0.5) / 40, 1) for i in range(40)]
    return [lengths[0] if which == 0 else lengths[-1] for _, which in sorted(places)]


def test_a_step_takes_as_many_tokens_as_on_the_device(tiny: Path, plan: Any) -> None:
    """8,000 prompt tokens are four steps of 2,048 on a CPU, and one of 8,192 on a GPU."""
    args = (tiny, "--pool-bytes", "64m", "--workload", "4,2000,1")
    assert plan(*args)["batch"]["unified_steps"] == 4
    assert plan(*args, "--gpu", "80g")["batch"]["unified_steps"] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\na,30,5\nb,9000,7\nc,20,0\nd,1,1\n"),
        (
            "mooncake.jsonl",
            "".join(
                json.dumps({"timestamp": 0, "input_length": p, "output_length": o, "hash_ids": [0]}) + "\n"
                for p, o in ((30, 5), (9000, 7), (20, 0), (1, 1))
            ),
        ),
    ],
)
def test_traces(tmp_path: Path, tiny: Path, plan: Any, name: str, text: str) -> None:
    """The first three of each; one of them is longer than the model takes, and one asks for no output at all."""
    (tmp_path / name).write_text(text)
    batch = plan(tiny, "--pool-bytes", "1m", "--workload", tmp_path / name, "--requests", 3)["batch"]
    assert (batch["requests"], batch["left_out"]) == (2, 1)
    assert (batch["prompt_tokens"], batch["output_tokens"]) == (25, 3)


# -- people -------------------------------------------------------------------------------------------------


def test_a_table_for_people(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-4-e2b-it", "--gpu", "l4", "-tp", "2", "--enforce-eager"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "text_config in config.json of google/gemma-4-E2B-it",
        "22.03 GiB",
        "assumed",
        "12 + 16 sharing",
        "2.33 times the bytes",
        "131,071",
        "binds first",
        "static walls for prompts of 1,024 and outputs of 256: full ",
        "planned for 2 ranks",
        "--enforce-eager changes nothing in a plan",
    ):
        assert part in shown
    assert main(["plan", str(tiny), "--pool-bytes", "200k", *MIX]) == 0
    shown = capsys.readouterr().out
    assert "static walls for the workload: full " in shown
    assert "dry run of 46 requests: mean prompt 66, output 40" in shown
    assert " tried)" in shown


def test_one_kind_of_cache_has_nothing_to_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99}))
    assert main(["plan", str(path), "--pool-bytes", "8m", "--workload", "4,64,4"]) == 0
    shown = capsys.readouterr().out
    assert "static: one kind of cache: there is nothing to split" in shown
    assert "no split holds" not in shown


def test_a_config_json_is_enough(tiny: Path, tmp_path: Path, plan: Any) -> None:
    """Under any name, and nothing else beside it."""
    other = tmp_path / "shape.json"
    other.write_text((tiny / "config.json").read_text())
    found, whole = plan(other), plan(tiny)
    assert found["groups"] == whole["groups"]
    assert found["budget"]["weight_bytes"] == whole["budget"]["weight_bytes"]
    assert found["source"] == str(other)


AHEAD = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64, "use_bidirectional_attention": True}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("gemma-3-1b", "--gpu", "h300"), "--gpu h300: not a size, nor a GPU known here: h200, h100, h20, a100"),
        (("gemma-3-1b", "--gpu", "0"), "--gpu 0: a GPU has memory"),
        (
            ("gemma-4-31b-it", "--gpu", "rtx4090"),
            "gemma-4-31b-it does not fit rtx4090: of its 25,243,670,282 bytes x --gpu-memory-utilization 0.9, weights "
            "take 61,39",
        ),
        (("gemma-3-1b", "--gpu", "7591000000"), "where one page of every group takes"),
        (("gemma-3-1b", "--gpu", "l4", "--pool-bytes", "40g"), "--pool-bytes 42,949,672,960 is more than the "),
        (("gemma-3-1b", "--reserve", "1g"), "--reserve says what a GPU's memory goes to: give --gpu too"),
        (("gemma-3-1b", "--gpu", "l4", "--weights", "1.3g"), "argument --weights: '1.3g' is not a whole number"),
        (("gemma-3-4b", "-tp", "3"), "-tp 3 does not divide the 4 heads or channels of layer 5 in group full"),
        (("gemma-3-4b", "-tp", "0"), "-tp and --requests take a number of at least 1"),
        (("{tmp}/ahead.json",), "layer 0 of gemma3_text cannot be served: Gemma3Attention is not causal"),
        (("{tmp}/none.json",), "none.json: no such file; give a config.json, a model as for serve, or one of gemma"),
        (("./nowhere",), "./nowhere: no such file or directory"),
        (("gemma-3-1b", "--workload", "5,1"), "--workload 5,1: neither N,P,O such as 64,8192,256 nor a file"),
        (("gemma-3-1b", "--workload", "5,1,0"), "--workload 5,1,0: a count, a prompt and an output of at least 1"),
        (("gemma-3-1b", "--workload", "5,40000,9"), "every request is longer than a sequence can be, 32,768 tokens"),
        (("gemma-3-1b", "--workload", "{tmp}/odd.csv"), "request 1 has none of the columns output_length, output"),
        (("gemma-3-1b", "--workload", "{tmp}/odd.jsonl"), "line 1 is not JSON"),
        (("gemma-3-1b", "--pool-bytes", "1m", "--max-model-len", "8k"), "one sequence of 8,192 tokens needs"),
    ],
)
def test_what_is_wrong_is_one_line(
    args: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ahead.json").write_text(json.dumps(AHEAD))
    (tmp_path / "odd.csv").write_text("input,colour\n4,red\n")
    (tmp_path / "odd.jsonl").write_text("input: 4\n")
    code = run("plan", *(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert text in refusal(code, *capsys.readouterr())
