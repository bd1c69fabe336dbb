"""The routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from isthmus import __version__
from isthmus.server import chat, completions, conversation, dashboard_page, errors
from isthmus.server.answer import Identity
from isthmus.server.config import ServerConfig
from isthmus.server.dashboard import Broadcast, Stream
from isthmus.server.dashboard_frame import frame, pool_json
from isthmus.server.engine_client import EngineClient
from isthmus.server.errors import ApiError, ErrorResponse, bad_request
from isthmus.server.metrics import Metrics
from isthmus.server.middleware import ApiKey, BodyLimit, RequestId
from isthmus.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from isthmus.server.reply import Reply, to_json
from isthmus.server.speller import Speller

_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request is wrong; `param` names the field.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The request took longer than `--request-timeout`.",
        413: "The body is larger than `--max-request-bytes`.",
        429: "The queue is full; try again after `Retry-After` seconds.",
        503: "There is no engine now; try again after `Retry-After` seconds.",
    }.items()
}


def _failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route declares for the statuses that it can give."""
    return {status: _FAILURES[status] for status in statuses}


class Front:
    """What the routes share."""

    def __init__(self, config: ServerConfig, client: EngineClient, metrics: Metrics) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.draining = False
        self.started = int(time.time())
        self._speller: Speller | None = None
        self.broadcast = Broadcast(client.look, lambda: frame(self), lambda: self.draining and client.in_flight == 0)

    @property
    def newest_speller(self) -> Speller | None:
        """The same whatever has become of the engine since; None before the first one is ready."""
        return self._speller

    def be_ready(self, speller: Speller) -> None:
        """The first engine is ready: from here on requests are served."""
        self._speller = speller

    @property
    def speller(self) -> Speller:
        """The model's tokenizer and template. ApiError 503 before there is an engine, or once the server stops."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self.client.require_ready()
        assert self._speller is not None
        return self._speller

    @property
    def model(self) -> str:
        """What clients call the model."""
        return self.config.served_model_name or self.speller.info.name

    def require_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not served. No name means the one that is."""
        if name is not None and name != self.model:
            message = f"model {name!r:.200} is not served here: ask for {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def build_app(front: Front) -> FastAPI:
    """The ASGI app, errors and middleware included."""
    app = FastAPI(title="Isthmus", version=__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    _add_state_routes(app, front)
    _add_token_routes(app, front)
    _add_completion_routes(app, front)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=front.config.max_request_bytes)
    if front.config.api_key is not None:
        app.add_middleware(ApiKey, key=front.config.api_key)
    if front.config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=front.config.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestId)
    app.openapi = _openapi_of(app)  # type: ignore[method-assign]
    return app


def _add_state_routes(app: FastAPI, front: Front) -> None:
    @app.get("/", response_model=dict[str, str])
    async def root(request: Request) -> Response:
        """The dashboard for browsers; for others, where to go from here."""
        if dashboard_page.wants_page(request.headers):
            return dashboard_page.answer("index.html", request.headers)
        links = {"server": "isthmus", "version": __version__, "api": "/v1", "openapi": "/openapi.json"}
        return Response(to_json(links), 200, {"vary": "accept"}, "application/json")

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        return dashboard_page.answer(name, request.headers)

    @app.get("/health", responses=_failures(503))
    async def health() -> dict[str, str]:
        """200 while requests are served."""
        _ = front.speller
        return {"status": "ok"}

    @app.get("/version", responses=_failures(401))
    async def version() -> dict[str, str]:
        """Which Isthmus this is."""
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """In the text format of Prometheus."""
        return Response(front.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", responses=_failures(401, 503))
    async def models() -> dict[str, Any]:
        """The model that is served."""
        entry = _model(front)
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}", responses=_failures(401, 404, 503))
    async def model(name: str) -> dict[str, Any]:
        """The model that is served, by name."""
        front.require_model(name)
        return _model(front)

    @app.get("/v1/pool", responses=_failures(401, 503))
    async def pool() -> dict[str, Any]:
        """The arena in bytes at one moment."""
        return _pool(front.client)

    @app.get("/v1/pool/stream", response_class=Response, responses=_failures(401, 429))
    async def watch() -> Response:
        """The arena and who is being served, as server-sent events: what the dashboard and `isthmus top` show."""
        return Stream(front.broadcast)

    async def reset() -> dict[str, str]:
        """Forget cached prefixes that no request uses."""
        await front.client.reset_prefix_cache()
        return {"status": "ok"}

    for path in ("/reset_prefix_cache", "/flush_cache"):
        app.post(path, responses=_failures(401, 503), operation_id=path[1:])(reset)


def _add_token_routes(app: FastAPI, front: Front) -> None:
    responses = _failures(400, 401, 404, 413, 503)  # they never queue

    @app.post("/tokenize", responses=responses)
    async def tokenize(request: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text, or of messages by the chat template."""
        speller = front.speller
        front.require_model(request.model)
        if request.messages is not None:
            ids = await conversation.render(speller, request.messages, [], request.chat_template_kwargs)
        else:
            text, special = request.prompt or "", request.add_special_tokens is not False
            ids = await speller.aside(lambda: speller.encode(text, add_special_tokens=special))
        return TokenizeResponse(count=len(ids), max_model_len=speller.info.max_model_len, tokens=ids)

    @app.post("/detokenize", responses=responses)
    async def detokenize(request: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""
        speller = front.speller
        front.require_model(request.model)
        if any(token >= speller.info.vocab_size for token in request.tokens):
            raise bad_request(f"tokens: an id is outside the vocabulary of {speller.info.vocab_size:,}", "tokens")
        return DetokenizeResponse(prompt=await speller.aside(lambda: speller.decode(request.tokens)))


def _add_completion_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", response_class=Response, responses=_FAILURES)
    async def complete(request: CompletionRequest) -> Response:
        """Continuations of one or many prompts."""
        speller = front.speller
        front.require_model(request.model)
        identity = Identity(f"cmpl-{uuid.uuid4().hex}", front.model)
        call = front.client.submit(identity.id, await completions.jobs(request, speller))
        answer = completions.stream if request.stream else completions.whole
        return Reply(call, answer(request, call, identity, speller), stream=bool(request.stream))

    @app.post("/v1/chat/completions", response_class=Response, responses=_FAILURES)
    async def chat_complete(request: ChatRequest) -> Response:
        """The assistant's next message."""
        speller = front.speller
        front.require_model(request.model)
        identity = Identity(f"chatcmpl-{uuid.uuid4().hex}", front.model)
        call = front.client.submit(identity.id, await chat.jobs(request, speller))
        answer = chat.stream if request.stream else chat.whole
        return Reply(call, answer(request, call, identity), stream=bool(request.stream))


def _model(front: Front) -> dict[str, Any]:
    return {
        "id": front.model,
        "object": "model",
        "created": front.started,
        "owned_by": "isthmus",
        "max_model_len": front.speller.info.max_model_len,
    }


def _pool(client: EngineClient) -> dict[str, Any]:
    client.require_ready()
    assert client.stats is not None, "an engine is ready once it has reported"
    return pool_json(client.stats)


def _openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """FastAPI's document without the 422 it claims for every route: here that is a 400."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    return openapi
