"""What happens to every request before a route sees it, as plain ASGI: identity, key, size."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/metrics"})
"""Paths that need no key: probes and scrapers have none, and they tell nothing of anybody's text."""

OPEN_FOLDER = "/static/"
"""The dashboard's own files: nothing of the server's."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class RequestId:
    """Repeats `X-Request-Id` in the answer, or makes one up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """401 without the right bearer token."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            known = scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._key)
            if not known:
                message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                error = ApiError(401, message, code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class BodyLimit:
    """413 for a body that is larger than allowed, whether it says so or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > self._limit:
            await self._error().response()(scope, receive, send)
            return
        taken = 0

        async def receive_some() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise self._error()
            return message

        await self._app(scope, receive_some, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than --max-request-bytes ({self._limit:,})", code="request_too_large")
