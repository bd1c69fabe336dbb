"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

logger = logging.getLogger("isthmus.server")

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None  # the field of the request that is wrong
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody


class ApiError(HTTPException):
    """An answer other than success. `message` is one line: what, where, what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As an HTTP answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, math.ceil(self.retry_after)))}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body), self.status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param, code=code)


def install(app: FastAPI) -> None:
    """Let every error leave the app in this form."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> Response:
        return _from_validation(error.errors(), error.body).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        path = f"{request.method} {request.url.path}"
        known = {
            400: "the body cannot be read as JSON",
            404: f"{path}: there is no such path",
            405: f"{path}: the path has no such method",
        }
        answer = ApiError(error.status_code, known.get(error.status_code, str(error.detail))).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(UnicodeEncodeError)
    async def _unicode(request: Request, error: UnicodeEncodeError) -> Response:
        return bad_request("the body has text that is not valid Unicode (half of a surrogate pair)").response()

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return ApiError(500, f"the server failed on this request ({type(error).__name__}); its log says why").response()


def _from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The first of pydantic's errors that leads deepest into the body: for a union, the alternative that was meant."""
    depth = [len(_path(error, body)) for error in errors]
    first = errors[depth.index(max(depth))]
    path = _path(first, body)
    param = ".".join(path) if path else None
    kind, message = first["type"], str(first["msg"])
    named = getattr(first.get("ctx", {}).get("error"), "param", None)  # the field that a check of the model names
    if named is not None:
        param = f"{param}.{named}" if param else str(named)
    if kind == "json_invalid":
        reason, place = first.get("ctx", {}).get("error", message), first["loc"][-1]
        return bad_request(f"the body is not JSON: {reason} at character {place}")
    if param is None and body is None:
        return bad_request("the body is empty: send a JSON object")
    if param is None and isinstance(body, bytes):
        return bad_request("the body is not sent as JSON: add the header Content-Type: application/json")
    if param is None:
        return bad_request("the body is not a JSON object")
    name = param or '""'
    texts = {
        "extra_forbidden": f"{name} is not known to this server",
        "none_required": f"{name} is not supported by this server: leave it out",
        "missing": f"{name} is missing",
        "value_error": f"{name}: {message.removeprefix('Value error, ')}",
    }
    found = texts.get(kind, f"{name}: {message[:1].lower()}{message[1:]}")
    return bad_request(found, param, "unknown_parameter" if kind == "extra_forbidden" else None)


def _path(error: Mapping[str, Any], body: Any) -> list[str]:
    """Where in the body, without the names of union members that pydantic puts between."""
    path: list[str] = []
    node = body
    for step in error["loc"][1:]:
        if (isinstance(node, dict) and step in node) or (isinstance(node, list) and isinstance(step, int)):
            node = node[step]
        elif error["type"] != "missing" or step != error["loc"][-1]:
            continue
        path.append(str(step))
    return path
