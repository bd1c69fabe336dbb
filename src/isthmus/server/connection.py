"""A connection that an answer can cut. ASGI knows only answers that end in order, and those wait for their reader."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_CUT = "isthmus.cut"


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses the class when it is imported
    """uvicorn's, whose requests bring the way to cut their connection."""

    app: ASGIApp

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client is there."""
        super().connection_made(transport)
        app = self.app

        async def app_that_can_cut(scope: Scope, receive: Receive, send: Send) -> None:
            extensions = {**scope.get("extensions", {}), _CUT: transport.abort}
            await app({**scope, "extensions": extensions}, receive, send)

        self.app = app_that_can_cut


def cut(scope: Scope) -> None:
    """Close a request's connection now: what was not sent yet is lost. `http.disconnect` is received soon after."""
    scope["extensions"][_CUT]()
