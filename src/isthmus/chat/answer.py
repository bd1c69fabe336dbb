"""An answer of a chat as it comes, and what it took."""

from __future__ import annotations

import time

from isthmus.chat.turns import Piece


class Answer:
    """One answer; its clock runs from the start."""

    def __init__(self) -> None:
        self.text = ""
        self.stopped = False  # by the user
        self._counts = Piece("")  # the newest that the speaker told
        self._start = time.perf_counter()
        self._first: float | None = None  # when the first piece came
        self._last = 0.0  # and the newest

    def add(self, piece: Piece) -> None:
        """More of it."""
        self.text += piece.text
        old = self._counts
        self._counts = Piece(
            "",
            old.prompt_tokens if piece.prompt_tokens is None else piece.prompt_tokens,
            old.cached_tokens if piece.cached_tokens is None else piece.cached_tokens,
            old.output_tokens if piece.output_tokens is None else piece.output_tokens,
            piece.finish_reason or old.finish_reason,
        )
        if piece.text or piece.finish_reason:
            self._last = time.perf_counter()
            self._first = self._first or self._last

    def summary(self) -> str:
        """One line: tokens, how many of them the cache knew, and tokens per second after the first."""
        parts, last = [], self._counts
        if last.prompt_tokens is not None:
            cached = "" if last.cached_tokens is None else f", {last.cached_tokens:,} of them cached"
            parts.append(f"{last.prompt_tokens:,} tokens in{cached}")
        if last.output_tokens is not None:
            parts.append(f"{last.output_tokens:,} out")
            if self._first is not None and last.output_tokens > 1 and self._last > self._first:
                parts.append(f"{(last.output_tokens - 1) / (self._last - self._first):,.1f} tok/s")
        if self._first is not None:
            parts.append(f"first after {self._first - self._start:.2f} s")
        if self.stopped:
            parts.append("stopped" if self.text else "stopped before a word: an empty line asks again")
        elif last.finish_reason == "length":
            parts.append("cut at the limit of tokens")
        return " · ".join(parts)
