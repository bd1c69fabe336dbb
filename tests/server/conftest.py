"""Servers that tests share, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import Server, serve
from tests.server.tiny_model import write_tiny_model

PLAIN = ("--dtype", "float32", "--page-size", "4", "--pool-bytes", "4m", "--max-num-seqs", "8")
TIGHT = (
    *("--dtype", "float32", "--page-size", "4", "--pool-bytes", "300k", "--max-num-seqs", "2"),
    *(
        "--max-num-batched-tokens",
        "8",
        "--max-queue",
        "4",
        "--max-request-bytes",
        "64k",
        "--request-timeout",
        "20",
        "--max-total-tokens",
        "1500",
    ),
    *("--served-model-name", "tight", "--allowed-origins", "http://friend.example"),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def shared_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(folder, tmp_path_factory.mktemp("logs"), *PLAIN, "--max-num-batched-tokens", "64") as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A server with room; idle before and after each test, all pages back."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture(scope="session")
def shared_tight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(folder, tmp_path_factory.mktemp("logs"), *TIGHT, ISTHMUS_API_KEY="secret") as server:
        server.http.headers["authorization"] = "Bearer secret"
        server.openai.api_key = "secret"
        yield server


@pytest.fixture
def tight(shared_tight: Server) -> Iterator[Server]:
    """A server where two sequences run, memory holds one long one, and a key is needed."""
    yield shared_tight
    shared_tight.wait_idle()
