"""`isthmus serve`: start the engine, listen, drain on SIGTERM, close.

start    listen at once (503 until the engine is ready); a wrong model or setting ends it with one line
stop     SIGTERM or Ctrl-C: no new requests, running ones get --drain-timeout to end; a second signal ends at once
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import disable_created_metrics

from isthmus.errors import ConfigError
from isthmus.flags import engine_args
from isthmus.server.app import Front, build_app
from isthmus.server.config import ServerConfig
from isthmus.server.connection import Protocol
from isthmus.server.engine_client import EngineClient, EngineError
from isthmus.server.metrics import Metrics
from isthmus.server.speller import Speller
from isthmus.server.templates import read_template
from isthmus.server.wire import ModelInfo

logger = logging.getLogger("isthmus.server")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Exit codes: 0 stopped, 1 the engine broke at the start; IsthmusError for bad input."""
    values = engine_args(args, ServerConfig)
    names = {spec.name for spec in dataclasses.fields(ServerConfig)}
    config = ServerConfig(**{name: value for name, value in values.items() if name in names})
    if config.api_key is None and "ISTHMUS_API_KEY" in os.environ:
        config = dataclasses.replace(config, api_key=os.environ["ISTHMUS_API_KEY"])
    if config.chat_template is not None:
        read_template(config.chat_template)  # found wrong before a model is loaded
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series, which nobody asks for
    engine = {name: value for name, value in values.items() if name not in names}
    try:
        asyncio.run(Service(config, engine).run())
    except EngineError as error:
        print(f"isthmus: error: {error}", file=sys.stderr)
        return 1
    return 0


class Service:
    """Front, engine and listener together."""

    def __init__(self, config: ServerConfig, engine: dict[str, Any]) -> None:
        self.config = config
        self.metrics = Metrics(lambda: self.client.stats)
        self.client = EngineClient(
            engine, self.metrics, max_queue=config.max_queue, request_timeout=config.request_timeout
        )
        self.front = Front(config, self.client, self.metrics)
        self._deadline: asyncio.TimerHandle | None = None
        self._speller: Speller | None = None

    async def run(self) -> None:
        """Serve until a signal. EngineError or ConfigError when the first engine does not get ready."""
        listener = _listen(self.config.host, self.config.port)
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(self.front),
                http=Protocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=2048,
                timeout_keep_alive=75,  # longer than clients and proxies keep theirs, so that they close first
                timeout_graceful_shutdown=int(self.config.drain_timeout) + 5,
            )
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        supervisor = asyncio.create_task(self.client.supervise(ready))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            with self._signals(server):
                waiting: list[asyncio.Future[Any]] = [ready, serving, supervisor]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not ready.done() and supervisor.done():
                    supervisor.result()  # it ends by itself only where it fails
                if ready.done():
                    self._be_ready(ready.result(), listener)
                    await serving
        finally:
            server.should_exit = True
            supervisor.cancel()
            await asyncio.gather(serving, supervisor, return_exceptions=True)
            if self._deadline is not None:
                self._deadline.cancel()
            if self._speller is not None:
                self._speller.close()

    def _be_ready(self, info: ModelInfo, listener: socket.socket) -> None:
        self._speller = Speller(info, self.config.chat_template)
        self.front.be_ready(self._speller)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"isthmus: serving {self.front.model} on http://{shown}:{port}", flush=True)

    @contextlib.contextmanager
    def _signals(self, server: uvicorn.Server) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, server, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, server: uvicorn.Server, number: int) -> None:
        if self.front.draining:
            logger.warning("%s again: ending at once", signal.Signals(number).name)
            server.force_exit = True
            self.client.stop_calls()
            return
        left, limit = self.client.in_flight, self.config.drain_timeout
        wait = f"; {left} running, which get {limit:g} s to end; a second signal ends them at once" if left else ""
        logger.info("%s: stopping%s", signal.Signals(number).name, wait)
        self.front.draining = True
        server.should_exit = True
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.config.drain_timeout, self.client.stop_calls)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket: whether the address is free is known before a model is loaded. ConfigError if it is not."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE  # of which Python's own text repeats the address
        why = f"{os.strerror(errno.EADDRINUSE)}: stop what does, or choose another --port" if taken else error.strerror
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({why or error})") from error
