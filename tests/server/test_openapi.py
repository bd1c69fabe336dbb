"""The server against its own OpenAPI document: no generated input brings it down."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from tests.server.running import Server


@pytest.fixture(scope="module")
def api(shared_server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")


def test_the_document(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/pool", "/tokenize"} <= set(document["paths"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
    assert "logit_bias" in document["components"]["schemas"]["CompletionRequest"]["properties"]


def test_routes_declare_the_statuses_they_can_give(server: Server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    declared = {
        f"{method.upper()} {path}": {int(status) for status in operation["responses"]} - {200}
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    served = {400, 401, 404, 408, 413, 429, 503}
    assert declared == {
        "GET /": set(), "GET /health": {503}, "GET /metrics": set(),  # open without a key
        "GET /version": {401}, "GET /v1/models": {401, 503}, "GET /v1/models/{name}": {401, 404, 503},
        "GET /v1/pool": {401, 503}, "GET /v1/pool/stream": {401, 429},
        "POST /reset_prefix_cache": {401, 503}, "POST /flush_cache": {401, 503},
        "POST /tokenize": served - {408, 429}, "POST /detokenize": served - {408, 429},
        "POST /v1/completions": served, "POST /v1/chat/completions": served,
    }  # fmt: skip


PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/{name}")


@pytest.mark.parametrize("path", PATHS)
def test_no_generated_input_is_a_server_error(server: Server, api: Any, path: str) -> None:
    operation = api[path]["GET" if "{" in path else "POST"]

    @settings(
        max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict):  # long answers add nothing here
            for name in ("max_tokens", "max_completion_tokens", "n", "min_tokens"):
                value = case.body.get(name)
                if isinstance(value, int) and value > 8:
                    case.body[name] = 8
        case.call_and_validate(checks=[not_a_server_error], timeout=60)

    run()
