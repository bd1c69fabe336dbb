"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.engine.detokenize import REPLACEMENT
from isthmus.server.wire import Scored


class CompletionLogprobs:
    """The form of `/v1/completions`: parallel lists, with each token's place in the text.

    Args:
        count: how many alternatives were asked for.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0

    def add(self, entries: Sequence[list[Scored] | None], first: str = "") -> dict[str, list[Any]]:
        """Lists for the next tokens. None is a token nothing predicts, the first of a prompt; its text is `first`."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = first if entry is None else entry[0].text
            found["tokens"].append(text)
            found["token_logprobs"].append(None if entry is None else entry[0].logprob)
            found["top_logprobs"].append(None if entry is None else self._top(entry))
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found

    def _top(self, entry: list[Scored]) -> dict[str, float]:
        top: dict[str, float] = {}
        for scored in sorted(entry, key=lambda scored: scored.rank):
            top.setdefault(scored.text, scored.logprob)  # several tokens may have one text: the likeliest stands
        return top


def chat_logprobs(entries: Sequence[list[Scored]], count: int) -> dict[str, Any]:
    """The form of `/v1/chat/completions`: an object per token."""
    return {"content": [_token(entry[0]) | {"top_logprobs": _most_likely(entry, count)} for entry in entries]}


def _most_likely(entry: list[Scored], count: int) -> list[dict[str, Any]]:
    ranked = sorted(entry, key=lambda scored: scored.rank)
    return [_token(scored) for scored in ranked[:count] if scored.rank <= count]


def _token(scored: Scored) -> dict[str, Any]:
    # A token that is part of a character has no text of its own, so no bytes either.
    unclear = REPLACEMENT in scored.text
    return {"token": scored.text, "logprob": scored.logprob, "bytes": None if unclear else list(scored.text.encode())}
