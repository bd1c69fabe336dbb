"""A killed engine leaves its journal behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from isthmus.memory import Replay
from tests.server.running import serve, until
from tests.server.tiny_model import write_tiny_model


@pytest.mark.slow
def test_a_killed_engine_leaves_its_journal_beside_the_next_ones(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.journal", write_tiny_model(tmp_path / "tiny")
    flags = ("--dtype", "float32", "--pool-bytes", "1m", "--page-size", "4", "--journal", str(path))
    with serve(folder, tmp_path, *flags) as server:
        ask = {"prompt": "one two", "max_tokens": 8, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=ask).status_code == 200
        os.kill(server.engine_pid(), signal.SIGKILL)
        until(lambda: server.http.get("/health").status_code, lambda status: status == 503)
        until(lambda: server.http.get("/health").status_code, lambda status: status == 200)
        assert server.http.post("/v1/completions", json=ask | {"max_tokens": 3}).status_code == 200
    for name, least in (("a.journal.1", 8), ("a.journal", 3)):
        life = Replay(tmp_path / name)
        for _ in life:
            life.pool.check()
        assert life.step >= least
        assert len(life.owners.names) == 1
