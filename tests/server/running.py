"""A real server on loopback, and what tests ask of it."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

T = TypeVar("T")
DEADLINE = 60.0  # seconds; far more than anything takes, for machines that are busy


def until(look: Callable[[], T], ok: Callable[[T], bool] = bool, deadline: float = DEADLINE) -> T:
    """Look until what is seen is ok."""
    end = time.monotonic() + deadline
    while not ok(seen := look()):
        assert time.monotonic() < end, f"still {seen!r} after {deadline:g} s"
    return seen


class Server:
    """A running `isthmus serve`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = self._wait_for_url()
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)

    def _wait_for_url(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(DEADLINE), self.log.read_text()
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"{line!r}\n{self.log.read_text()}"
        return found[0]

    def pool(self) -> dict[str, Any]:
        """`/v1/pool`, checked to sum."""
        answer = self.http.get("/v1/pool")
        assert answer.status_code == 200, answer.text
        pool: dict[str, Any] = answer.json()
        parts = pool["null_bytes"] + pool["gap_bytes"] + pool["tail_bytes"]
        parts += sum(sum(group["bytes"].values()) for group in pool["groups"])
        assert parts == pool["arena_bytes"]
        return pool

    def wait_idle(self) -> dict[str, Any]:
        """Wait until nothing runs or waits; then no request may own a page."""
        pool = until(self.pool, lambda pool: pool["running"] + pool["waiting"] == 0)
        assert live(pool) == 0, pool
        return pool

    def metrics(self) -> dict[str, float]:
        """Samples by their name with labels."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def engine_pid(self) -> int:
        """Process id of the engine."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                command = (stat.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == self.process.pid and b"isthmus.server.worker" in command:
                return int(stat.parent.name)
        raise AssertionError("there is no engine process")


def live(pool: dict[str, Any]) -> int:
    """Bytes owned by requests."""
    return sum(group["bytes"]["live"] for group in pool["groups"])


@contextmanager
def serve(
    model: str | Path, folder: Path, *flags: str, module: Sequence[str] = ("isthmus",), **environment: str
) -> Iterator[Server]:
    """Start a server on a free port and stop it at the end."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    with log.open("w") as errors:
        process = start(model, errors, *flags, module=module, **environment)
    try:
        server = Server(process, log)
        with server.http:
            yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
        try:
            process.wait(DEADLINE)
        finally:
            process.kill()
        assert process.stdout is not None
        process.stdout.close()


def start(
    model: str | Path, errors: Any, *flags: str, module: Sequence[str] = ("isthmus",), **environment: str
) -> subprocess.Popen[str]:
    """`isthmus serve`, or what a module and its arguments make of it, with its standard output piped."""
    command = [sys.executable, "-m", *module, "serve", str(model), "--port", "0", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
