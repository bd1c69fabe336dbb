"""Answers as plain ASGI: nothing is buffered, and a client that vanishes ends its call at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isthmus.server.call import Call
from isthmus.server.errors import ApiError

to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


class Reply(Response):
    """Sends what `chunks` yields while watching for the client to leave.

    As a stream, the status waits for the first chunk, so that an error before it has its own status; one after it is
    an event, and then the stream ends without `[DONE]`. Otherwise the only chunk is the whole body.
    """

    def __init__(self, call: Call, chunks: AsyncIterator[bytes], *, stream: bool) -> None:
        self._call = call
        self._chunks = chunks
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._stream:
                await self._send_stream(send)
            else:
                await self._send_whole(send)
        finally:
            self._call.close()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.close()

    async def _send_whole(self, send: Send) -> None:
        async for body in self._chunks:
            await send(_head("application/json", length=len(body)))
            await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        first = await anext(self._chunks, None)
        if first is None:
            return  # the client left before anything came
        await send(_head("text/event-stream; charset=utf-8"))
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _head(content_type: str, length: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", content_type.encode())]
    if length is None:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    else:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}
