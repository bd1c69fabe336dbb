"""Settings of the server: flags, YAML, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from isthmus.engine.config import settings
from isthmus.errors import ConfigError
from isthmus.flags import Parser, add_engine_flags, engine_args, engine_settings
from isthmus.server.config import ServerConfig


def parse(*flags: str) -> dict[str, Any]:
    parser = Parser(prog="isthmus")
    add_engine_flags(parser, ServerConfig)
    return engine_args(parser.parse_args(flags), ServerConfig)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nport: 9000\nmax-request-bytes: 1m\nrequest-timeout: 5\nallowed_origins: 'a, b'\n")
    values = parse("--config", str(file), "--port", "9001")
    names = {spec.name for spec in dataclasses.fields(ServerConfig)}
    config = ServerConfig(**{name: value for name, value in values.items() if name in names})
    assert (config.port, config.max_request_bytes, config.request_timeout) == (9001, 1 << 20, 5.0)
    assert config.origins == ["a", "b"]
    assert values["model"] == "demo"


def test_it_listens_to_this_machine_alone_unless_told() -> None:
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig().origins == []


@pytest.mark.parametrize(
    "values",
    [
        {"host": ""}, {"port": -1}, {"port": 65536}, {"served_model_name": ""}, {"api_key": ""}, {"max_queue": 0},
        {"max_request_bytes": 10}, {"request_timeout": 0}, {"drain_timeout": -1}, {"tensor_parallel_size": 2},
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(ConfigError, match="^--" + name.replace("_", "-")):
        ServerConfig(**values)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--context-length", "2k"], "max_model_len", 2048),
        (["--mem-fraction-static", "0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-cache-memory-bytes", "1m"], "pool_bytes", 1 << 20), (["--enable-unified-memory"], "memory", "unified"),
        (["--max-running-requests", "3"], "max_num_seqs", 3),
        (["--chunked-prefill-size", "4k"], "max_num_batched_tokens", 4096),
        (["--disable-radix-cache"], "enable_prefix_caching", False), (["--disable-cuda-graph"], "enforce_eager", True),
        (["-tp", "1"], "tensor_parallel_size", 1), (["--tp", "1"], "tensor_parallel_size", 1),
        (["--model-path", "x"], "model", "x"),
    ],
)  # fmt: skip
def test_flags_of_other_engines(flags: list[str], name: str, value: object) -> None:
    assert parse("demo", *flags)[name] == value


@pytest.mark.parametrize("flag", ["-t", "-tp1", "--tensor-parallel", "--po"])
def test_nothing_is_abbreviated(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("demo", flag, "1")
    assert f"unrecognized arguments: {flag} 1" in capsys.readouterr().err


def test_every_setting_is_explained_and_they_are_few() -> None:
    assert all(setting.help and setting.flag.startswith("--") for _, setting, _ in settings(ServerConfig))
    assert len(engine_settings(ServerConfig)) <= 32
