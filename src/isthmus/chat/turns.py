"""What has been said in a chat, and who can say what comes next."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from isthmus.errors import ConfigError
from isthmus.params import RequestError

Message: TypeAlias = dict[str, str]
"""`{"role": ..., "content": ...}`"""


class TooLongError(RequestError):
    """The conversation leaves the model no room for an answer."""


@dataclass(frozen=True)
class Piece:
    """What an answer gained. Counts are of the answer so far; None is what a speaker has not told."""

    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, not computed again
    output_tokens: int | None = None
    finish_reason: str | None = None


class Speaker(Protocol):
    """Who answers."""

    greeting: str  # who that is, for people

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """The next message as it comes. Closing the generator early stops the work on it.

        TooLongError, or another IsthmusError, if there can be no answer or no more of it.
        """
        ...


class Conversation:
    """A system message, if any, and complete turns: what the user said and what was answered."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []

    def messages(self) -> list[Message]:
        """All of it, as chat templates and OpenAI's API have it."""
        found = [] if self.system is None else [_message("system", self.system)]
        for said, answer in self.turns:
            found += [_message("user", said), _message("assistant", answer)]
        return found

    def asking(self, said: str) -> list[Message]:
        """All of it, and a message that waits for its answer."""
        return [*self.messages(), _message("user", said)]

    def save(self, path: Path) -> int:
        """Write one message a line as JSON; how many. ConfigError if the file cannot be written."""
        messages = self.messages()
        try:
            lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
            path.write_text("".join(lines), "utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        return len(messages)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
