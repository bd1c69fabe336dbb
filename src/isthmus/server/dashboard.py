"""One poller for all who watch, and the stream that each of them gets.

It asks the engine only while somebody watches and only when something happened. A watcher holds no frames: whoever
reads slowly gets the newest one next, and whoever takes none for `PATIENCE` seconds is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isthmus.server.connection import cut
from isthmus.server.errors import ApiError
from isthmus.server.reply import event

logger = logging.getLogger("isthmus.server")

INTERVAL = 0.5  # seconds between frames
MOST_WATCHERS = 32
PATIENCE = 10.0  # seconds


class Watcher:
    """Whoever watches: only whether there is a frame that it has not had."""

    def __init__(self) -> None:
        self.news = asyncio.Event()


class Broadcast:
    """Frames for any number of watchers, made once.

    Args:
        look: brings up to date what frames tell; gets the seconds it may take.
        frame: what there is to tell now.
        is_over: no more frames: the server stops.
    """

    def __init__(
        self,
        look: Callable[[float], Awaitable[None]],
        frame: Callable[[], dict[str, Any]],
        is_over: Callable[[], bool],
        *,
        interval: float = INTERVAL,
        most: int = MOST_WATCHERS,
        patience: float = PATIENCE,
    ) -> None:
        self.newest: bytes | None = None  # an event; None once there are no more
        self.patience = patience
        self._look, self._frame, self._is_over = look, frame, is_over
        self._interval = interval
        self._most = most
        self._watchers: set[Watcher] = set()
        self._poller: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def is_polling(self) -> bool:
        """Is anything asked of the engine?"""
        return self._poller is not None and not self._poller.done()

    def join(self) -> Watcher:
        """Somebody watches from now on. ApiError 429 when there are too many."""
        if len(self._watchers) >= self._most:
            raise ApiError(429, f"{self._most} dashboards are open: close one", code="too_many_watchers", retry_after=5)
        watcher = Watcher()
        self._watchers.add(watcher)
        if self.is_polling and self.newest is not None:
            watcher.news.set()
        elif not self.is_polling:
            self._poller = asyncio.create_task(self._poll())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It watches no more; when it was the last one, nothing is asked any more."""
        self._watchers.discard(watcher)
        if not self._watchers and self._poller is not None:
            self._poller.cancel()
            self._poller = self.newest = None

    async def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while not self._is_over():
                started = clock()
                await self._look(self._interval)
                self._tell(event(self._frame()))
                await asyncio.sleep(max(0.0, self._interval - (clock() - started)))
        except Exception as error:  # a fault here ends the streams, which their readers see, and nothing else
            logger.error("the dashboard's poller failed", exc_info=error)
        self._tell(None)

    def _tell(self, newest: bytes | None) -> None:
        self.newest = newest
        for watcher in self._watchers:
            watcher.news.set()


_FAREWELL = 1.0
"""Seconds in which a connection that was cut is noticed, so that its end is not taken for an answer that broke off."""


class Stream(Response):
    """Frames to one watcher until it leaves, is too slow, or the server stops."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all. ApiError 429 before anything is sent when there are too many watchers."""
        watcher = self._broadcast.join()
        sender = asyncio.create_task(self._send_all(watcher, send))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait([sender, left], return_when=asyncio.FIRST_COMPLETED)
            if sender.done() and not sender.result():
                logger.info("a dashboard that took nothing for %g s was dropped", self._broadcast.patience)
                cut(scope)
                await asyncio.wait([left], timeout=_FAREWELL)
        finally:
            self._broadcast.leave(watcher)
            for task in (sender, left):
                task.cancel()
            await asyncio.gather(sender, left, return_exceptions=True)

    async def _send_all(self, watcher: Watcher, send: Send) -> bool:
        """False when the watcher is too slow; the end of the answer would wait for it too."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await watcher.news.wait()
            watcher.news.clear()
            newest = self._broadcast.newest
            message = {"type": "http.response.body", "body": newest or b"", "more_body": newest is not None}
            try:
                async with asyncio.timeout(self._broadcast.patience):
                    await send(message)
            except TimeoutError:
                return False
            if newest is None:
                return True


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
