"""What all answers share: identity, usage, receipts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from isthmus.server.call import Call
from isthmus.server.protocol import Sampling
from isthmus.server.reply import DONE, event


@dataclass(frozen=True)
class Identity:
    """The fields that every chunk of an answer repeats."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of the API."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage(call: Call, completion_tokens: int | None = None) -> dict[str, Any]:
    """Tokens of a call: each prompt counts once, whatever `n`."""
    completion = call.completion_tokens if completion_tokens is None else completion_tokens
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": call.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }


def receipts(call: Call) -> dict[str, Any]:
    """The engine's receipts, one per prompt."""
    return {"receipt": call.receipts[0] if len(call.receipts) == 1 else call.receipts}


def ending(kind: str, call: Call, identity: Identity, request: Sampling, used: dict[str, Any]) -> bytes:
    """The last events of a stream: a chunk without choices for usage and receipt if they are due, then `[DONE]`."""
    extra: dict[str, Any] = {"usage": used} if request.include_usage else {}
    if request.wants_receipt:
        extra["isthmus"] = receipts(call)
    return (event(identity.envelope(kind, []) | extra) if extra else b"") + DONE
