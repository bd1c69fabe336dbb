"""One life of the engine process, from its start to its end, as seen from the front."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from isthmus.server import wire


class EngineProcess:
    """The process and the socket to it. A new one is made for every restart, so no message outlives its process."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        self._args = engine_args
        self._folder = TemporaryDirectory(prefix="isthmus-")  # readable by us alone
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None

    async def __aenter__(self) -> EngineProcess:
        endpoint = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._socket.bind(endpoint)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "isthmus.server.worker", stdin=asyncio.subprocess.PIPE
        )
        self._ended = asyncio.create_task(self._process.wait())
        assert self._process.stdin is not None
        start = wire.Start(endpoint, self._folder.name, self._args)
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process, at once if it has not ended."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        assert self._ended is not None
        await self._ended
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        assert self._process is not None
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def send(self, order: wire.ToEngine) -> None:
        """Queue an order; never blocks."""
        self._socket.send(wire.encode(order))

    async def receive(self) -> wire.ToFront | None:
        """The next message; None once the process has ended and everything it said was received."""
        assert self._ended is not None
        message = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait([message, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if message.done() or await self._socket.poll(0):
                return wire.decode_to_front(await message)
            return None
        finally:
            message.cancel()
