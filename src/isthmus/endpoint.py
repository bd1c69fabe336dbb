"""A running server with OpenAI's API, from outside: what it offers, and one line for whatever it does not do."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from isthmus.errors import ConfigError, IsthmusError

_GREETING = 15.0  # seconds without a byte, where it can answer at once


class RefusedError(ConfigError):
    """An answer that is an error, with what OpenAI's API says in it."""

    def __init__(self, line: str, text: str, code: str | None) -> None:
        super().__init__(line)
        self.text = text
        self.code = code


@dataclass(frozen=True)
class Offer:
    """A model that it serves."""

    name: str
    max_model_len: int | None  # the longest sequence; None where it does not tell


class Endpoint:
    """Where it listens.

    Args:
        url: http://host:port, with or without `/v1`.
        key: sent as a bearer token, to nobody else that the server may name. ConfigError if no header can carry it.
    """

    def __init__(self, url: str, key: str | None) -> None:
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError("a key is printable ASCII: look at --api-key or ISTHMUS_API_KEY")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def offer(self, name: str | None) -> Offer:
        """The model of that name, or the first. ConfigError if nobody answers, not to this key, or offers none."""
        with self._open("/v1/models", _GREETING, None) as response:
            try:
                entries: list[dict[str, Any]] = json.load(response)["data"]
                offers = [_offer(entry) for entry in entries]
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"--url {self.url}: its answer to /v1/models broke off ({_reason(error)})") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"--url {self.url}: its /v1/models is not that of OpenAI's API") from error
        found = next((offer for offer in offers if name in (None, offer.name)), None)
        if found is None:
            names = ", ".join(offer.name for offer in offers) or "none"
            raise ConfigError(f"--url {self.url}: it does not offer the model {name or 'that is due'}, but {names}")
        return found

    def events(self, path: str, body: Any, silence: float) -> Generator[dict[str, Any], None, None]:
        """What server-sent events carry, as they come, up to `[DONE]`. Closing the generator closes the connection.

        Args:
            silence: seconds without a byte after which the server counts as gone.

        RefusedError if it answers with an error, IsthmusError if it stops in the middle.
        """
        with self._open(path, silence, body) as response:
            try:
                for line in response:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield json.loads(data)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise IsthmusError(f"{self.url} ended the answer early ({_reason(error)})") from error
        raise IsthmusError(f"{self.url} ended the answer early")

    def _open(self, path: str, timeout: float, body: Any) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            for name, value in self.headers.items():
                request.add_unredirected_header(name, value)
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            self._refuse(path, error)
        except ValueError as error:
            raise ConfigError(f"--url {self.url}: {error}; give one such as http://127.0.0.1:8000") from error
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{self.url}: no server answers there ({_reason(error)}): start one with isthmus serve, or give --url"
            ) from error
        return response

    def _refuse(self, path: str, error: urllib.error.HTTPError) -> NoReturn:
        if error.code == 401:
            text = "refuses this key" if self.headers else "asks for a key: --api-key or ISTHMUS_API_KEY"
            raise ConfigError(f"{self.url} {text}") from error
        try:
            body = error.read()
        except (OSError, http.client.HTTPException):
            body = b""
        raise refusal(self.url + path, error.code, str(error.reason), body) from error


def refusal(url: str, status: int, reason: str, body: bytes) -> RefusedError:
    """An answer with that status as an error: what its body says, or else the reason that HTTP gives."""
    try:
        told = json.loads(body)["error"]
        text, code = str(told["message"]), told.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):  # of a proxy, perhaps
        text, code = reason, None
    text = f"{' '.join(text.split()):.300}"
    return RefusedError(f"{url} answers {status}: {text}", text, code)


def _offer(entry: Mapping[str, Any]) -> Offer:
    longest = entry.get("max_model_len")
    return Offer(str(entry["id"]), None if longest is None else int(longest))


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
