"""Settings of the server, beside those of the engine. Flags, YAML keys and the docs are generated from here."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.engine.config import Checked, parse_size, setting


@dataclass(frozen=True)
class ServerConfig(Checked):
    """Where it listens, who may ask, and how much it takes at once."""

    host: str = setting("--host", "address to listen on; 0.0.0.0 is everyone", default="127.0.0.1")
    port: int = setting("--port", "port to listen on; 0 picks a free one", default=8000)
    served_model_name: str | None = setting(
        "--served-model-name", "what requests call the model; default: its name here", default=None
    )
    api_key: str | None = setting(
        "--api-key", "key that requests must send as a bearer token; default: ISTHMUS_API_KEY, else none", default=None
    )
    chat_template: str | None = setting(
        "--chat-template", "file with a Jinja chat template; default: the model's own", default=None
    )
    allowed_origins: str | None = setting(
        "--allowed-origins", "origins browsers may ask from, separated by commas, or *; default: none", default=None
    )
    max_queue: int = setting(
        "--max-queue", "continuations that may wait for their first token; more are refused with 429", default=1024
    )
    max_request_bytes: int = setting(
        "--max-request-bytes", "largest request body; more is refused with 413", default=16 << 20, parse=parse_size
    )
    request_timeout: float = setting(
        "--request-timeout", "seconds a request may take in the engine before it is ended with 408", default=3600.0
    )
    drain_timeout: float = setting(
        "--drain-timeout", "seconds that running requests get to end after SIGTERM", default=30.0
    )
    tensor_parallel_size: int = setting(
        "--tensor-parallel-size", "devices that share a model; more than 1 is not built yet", default=1,
        aliases=("-tp", "--tp"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._require("host", bool(self.host), "an address")
        self._require("port", 0 <= self.port <= 65535, "between 0 and 65535")
        self._require("served_model_name", self.served_model_name != "", "a name")
        self._require("api_key", self.api_key != "", "a key that is not empty")
        self._require("max_queue", self.max_queue >= 1, "at least 1")
        self._require("max_request_bytes", self.max_request_bytes >= 1024, "at least 1k")
        self._require("request_timeout", self.request_timeout > 0, "more than 0 seconds")
        self._require("drain_timeout", self.drain_timeout >= 0, "0 seconds or more")
        alone = self.tensor_parallel_size == 1
        self._require("tensor_parallel_size", alone, "1 (this version runs a model on one device)")

    @property
    def origins(self) -> list[str]:
        """`allowed_origins` as a list."""
        return [origin.strip() for origin in (self.allowed_origins or "").split(",") if origin.strip()]
