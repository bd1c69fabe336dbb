"""When an engine process counts as ready, and how often one that keeps dying is started again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from isthmus.server import engine_client, wire
from isthmus.server.config import ServerConfig
from isthmus.server.engine_client import EngineClient
from isthmus.server.metrics import Metrics
from isthmus.server.serve import Service

INFO = wire.ModelInfo("tiny", "", None, {}, [], 300, 2048, 2)
REPORT = wire.Report([], [], [], wire.Stats(0, 0, 64, 64, 0, 0, [], 0, 8, 0, 0, 0, 0))


class Mayfly:
    """An engine process that gets ready and dies."""

    pid = 1
    ending = "ended with exit code 1"

    def __init__(self, engine_args: object) -> None:
        self._messages: list[wire.ToFront | None] = [INFO, REPORT, None]

    async def __aenter__(self) -> Mayfly:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing is left of it."""

    async def receive(self) -> wire.ToFront | None:
        return self._messages.pop(0)


def test_an_engine_is_ready_once_it_has_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that there is no arena to tell of."""
    seen: list[tuple[str, bool]] = []

    async def live() -> None:
        client = EngineClient({}, Metrics(lambda: None), max_queue=1, request_timeout=1.0)

        class Seen(Mayfly):
            async def receive(self) -> wire.ToFront | None:
                seen.append((client.state, client.stats is not None))
                if len(seen) == 4:
                    raise asyncio.CancelledError
                return await super().receive()

        monkeypatch.setattr(engine_client, "EngineProcess", Seen)
        monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.0)
        with pytest.raises(asyncio.CancelledError):
            await client.supervise(asyncio.get_running_loop().create_future())

    asyncio.run(live())
    assert seen == [("starting", False), ("starting", False), ("ready", True), ("restarting", False)]


def test_pauses_double_until_a_life_was_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which the twelfth life is longer than `STEADY`."""
    pauses: list[float] = []
    now = 0.0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 13:
            raise asyncio.CancelledError

    def monotonic() -> float:
        nonlocal now
        now += engine_client.STEADY + 1 if len(pauses) == 11 else 0.5
        return now

    monkeypatch.setattr(engine_client, "EngineProcess", Mayfly)
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(engine_client, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))

    async def live() -> None:
        client = EngineClient({}, Metrics(lambda: None), max_queue=1, request_timeout=1.0)
        ready: asyncio.Future[wire.ModelInfo] = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.CancelledError):
            await client.supervise(ready)
        assert ready.result() is INFO
        assert client.restarts == 12
        assert client.state == "stopped"

    asyncio.run(live())
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 0.25, 0.5]


def test_what_breaks_the_supervisor_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a port that answers 503 for good."""

    async def break_down(client: EngineClient, ready: object) -> None:
        raise LookupError("nobody foresaw this")

    monkeypatch.setattr(EngineClient, "supervise", break_down)

    async def serve() -> None:
        async with asyncio.timeout(60):
            await Service(ServerConfig(port=0), {}).run()

    with pytest.raises(LookupError, match="nobody foresaw"):
        asyncio.run(serve())
