"""Frames of a running server: connect, read, come back when the connection breaks."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.errors import ConfigError

Frame = Mapping[str, Any]

SILENCE = 15.0  # seconds without a frame after which a server counts as gone
RETRY = 1.0  # seconds between tries to reach it again


class LostError(ConfigError):
    """The server does not answer, or stopped to."""


def watch(url: str, key: str | None, retry: float = RETRY) -> Iterator[Frame | str]:
    """Frames without end; a line of text whenever the server is lost, after it was there once."""
    seen = False
    while True:
        try:
            for frame in frames(url, key):
                seen = True
                yield frame
            yield f"{url}: the server ended the stream"
        except LostError as error:
            if not seen:
                raise
            yield str(error)
        time.sleep(retry)


def frames(url: str, key: str | None) -> Iterator[Frame]:
    """What `/v1/pool/stream` tells, until the server ends it. LostError without a server, ConfigError without a key."""
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/v1/pool/stream", headers=headers)
        with urllib.request.urlopen(request, timeout=SILENCE) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
    except urllib.error.HTTPError as error:
        raise _refusal(url, error, key) from error
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}; give one such as http://127.0.0.1:8000") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        text = getattr(reason, "strerror", None) or str(reason)
        raise LostError(
            f"{url}: no server answers there ({text}): start one with isthmus serve, or give --url"
        ) from error


def pairs(news: Iterator[Frame | str], interval: float) -> Iterator[tuple[Frame | None, Frame | str]]:
    """`(the one shown before, the one to show)`: the newest at most every `interval` seconds, by the server's clock."""
    before: Frame | None = None
    for item in news:
        if isinstance(item, str):
            yield before, item
        elif before is None or item["time"] - before["time"] >= 0.95 * interval or item["time"] < before["time"]:
            yield before, item
            before = item


def two(news: Iterator[Frame]) -> tuple[Frame | None, Frame]:
    """A frame with an arena and the one before it, for rates; without an engine, the first one."""
    before = next(news, None)
    if before is None:
        raise ConfigError("the server is shutting down")
    frame = before if before["pool"] is None else next(news, before)
    return (None if frame is before else before), frame


def _refusal(url: str, error: urllib.error.HTTPError, key: str | None) -> ConfigError:
    if error.code == 401:
        return ConfigError(f"{url} refuses this key" if key else f"{url} asks for a key: --api-key or ISTHMUS_API_KEY")
    if error.code == 404:
        return ConfigError(f"{url} has no /v1/pool/stream: it is no Isthmus server, or an older one")
    try:
        text = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):  # of a proxy, perhaps
        text = error.reason
    return LostError(f"{url} answers {error.code}: {text}")
