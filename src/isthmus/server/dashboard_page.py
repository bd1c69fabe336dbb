"""The dashboard's page and its files: static, from this package alone, and forbidden to ask anybody else."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.datastructures import Headers
from starlette.responses import Response

from isthmus.server.errors import ApiError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}


def wants_page(headers: Headers) -> bool:
    """Would this client rather have HTML than JSON? Only one that names HTML, as browsers do."""
    weights = _weights(headers.get("accept", ""))
    html = weights.get("text/html", 0.0)
    return html > 0 and html >= weights.get("application/json", 0.0)


def _weights(accept: str) -> dict[str, float]:
    """Media types by their quality."""
    found: dict[str, float] = {}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            found[kind] = float(quality)
        except ValueError:
            found[kind] = 0.0
    return found


def answer(name: str, headers: Headers) -> Response:
    """A file of the dashboard, or 304 for a browser that has it. ApiError 404 for any other name."""
    found = _files().get(name)
    if found is None:
        raise ApiError(404, f"the dashboard has no file {name!r:.80}")
    content, tag = found
    more = {
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "etag": tag,
        "referrer-policy": "no-referrer",
        "vary": "accept",
        "x-content-type-options": "nosniff",
    }
    if headers.get("if-none-match") == tag:
        return Response(None, 304, more)
    return Response(content, 200, more, _TYPES[name.rpartition(".")[2]])


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Content and tag by path below `static/`; read once."""
    found = {}
    for name, file in _walk(resources.files("isthmus.server") / "static", ""):
        content = file.read_bytes()
        found[name] = content, f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return found


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            found.append((prefix + entry.name, entry))
    return found
