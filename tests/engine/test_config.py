"""Settings: sizes, ranges, and errors that name the flag."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from isthmus.engine.config import LAYERS, EngineConfig, MemoryConfig, parse_fractions, parse_size, settings
from isthmus.errors import ConfigError
from isthmus.params import SamplingParams


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("4g", 4 << 30), ("1.5M", 3 << 19), ("32k", 32768), (" 2 GiB ", 2 << 30), ("8kb", 8192), (12, 12)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "1073741824g"])
def test_a_size_beyond_any_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is larger than any memory"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "4t", "g", "-1g", "1.3", "four", "4 g g"])
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_splits() -> None:
    assert parse_fractions("full=0.5, window=0.25") == {"full": 0.5, "window": 0.25}
    with pytest.raises(ConfigError, match="is not a split"):
        parse_fractions("full:0.5")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"page_size": 0}, "--page-size"),
        ({"pool_bytes": 0}, "--pool-bytes"),
        ({"memory": "split"}, "--memory"),
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "tpu"}, "--device"),
        ({"load_format": "gguf"}, "--load-format"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "--max-num-batched-tokens"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"max_total_tokens": 0}, "--max-total-tokens"),
        ({"max_total_tokens": 15, "page_size": 16}, "--max-total-tokens"),
        ({"static_split": {"full": 0.5}}, "--static-split"),
        ({"memory": "static", "static_split": {"full": 0.8, "window": 0.3}}, "--static-split"),
        ({"memory": "static", "static_workload": (0, 5)}, "--static-workload"),
    ],
)
def test_a_wrong_value_names_its_flag(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} must be "):
        EngineConfig.build(model="demo", **values)


def test_flat_arguments_reach_their_layer_and_unknown_ones_are_refused() -> None:
    config = EngineConfig.build(model="demo", page_size=4, max_num_seqs=3, device="cpu")
    assert (config.model.model, config.memory.page_size, config.scheduler.max_num_seqs) == ("demo", 4, 3)
    with pytest.raises(ConfigError, match="unknown setting 'page_sise'"):
        EngineConfig.build(model="demo", page_sise=4)


def test_every_field_has_a_flag_of_its_own_and_help() -> None:
    flags = [flag for config in LAYERS.values() for _, s, _ in settings(config) for flag in (s.flag, *s.aliases)]
    assert len(flags) == len(set(flags))
    assert all(s.help and not s.help.endswith(".") for config in LAYERS.values() for _, s, _ in settings(config))
    assert len(list(settings(MemoryConfig))) == len(dataclasses.fields(MemoryConfig))


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 0},
        {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2}, {"presence_penalty": 3}, {"repetition_penalty": 0},
        {"max_tokens": 0}, {"min_tokens": 17}, {"stop": ["a", ""]}, {"logprobs": -1}, {"prompt_logprobs": -1},
        {"logit_bias": {3: float("nan")}},
    ],
)  # fmt: skip
def test_sampling_parameters_out_of_range_are_named(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"n": "2"}, {"n": True}, {"n": None}, {"seed": "x"}, {"seed": 1.0}, {"max_tokens": 1.5}, {"top_k": 2.0},
        {"temperature": "hot"}, {"temperature": True}, {"temperature": 10**400}, {"top_p": None}, {"stop": 5},
        {"stop": b"x"}, {"stop": [1]}, {"stop_token_ids": "ab"}, {"stop_token_ids": [1.0]}, {"stop_token_ids": 7},
        {"logit_bias": [1]}, {"logit_bias": {"1": 1.0}}, {"logit_bias": {1: "a"}}, {"ignore_eos": 1},
        {"logprobs": True}, {"prompt_logprobs": 1.0}, {"min_tokens": None}, {"grammar": 3},
    ],
)  # fmt: skip
def test_sampling_parameters_of_the_wrong_type_are_named(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        SamplingParams(**values)


def test_sampling_parameters_take_what_vllm_takes() -> None:
    params = SamplingParams(stop="x", top_k=-1, stop_token_ids=[3])
    assert (params.stop, params.top_k, params.stop_token_ids) == (("x",), 0, (3,))
    assert SamplingParams(stop=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_a_default_never_refuses_another_setting() -> None:
    """More sequences than the default step has tokens, on either device, and a step that was asked for stays."""
    config = EngineConfig.build(model="demo", max_num_seqs=4096)
    assert config.scheduler.max_num_batched_tokens == 4096
    assert config.on("cuda", {"model", "max_num_seqs"}).scheduler.max_num_batched_tokens == 8192
    asked = EngineConfig.build(model="demo", max_num_batched_tokens=512)
    assert asked.on("cuda", {"model", "max_num_batched_tokens"}).scheduler.max_num_batched_tokens == 512
    small = EngineConfig.build(model="demo", max_num_batched_tokens=100)
    for config in (small, small.on("cuda", {"model", "max_num_batched_tokens"})):
        assert config.scheduler.max_num_seqs == 100
    with pytest.raises(ConfigError, match=r"^--max-num-batched-tokens must be at least"):
        EngineConfig.build(model="demo", max_num_seqs=4096, max_num_batched_tokens=2048)
