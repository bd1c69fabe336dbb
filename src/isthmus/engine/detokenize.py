"""Tokens to text, as they come: one path for streams and for whole answers.

    tokens -> TextStream (holds back what later bytes may change) -> StopStrings (holds back a possible stop) -> text

The pieces a stream yields, joined, are the whole decode byte for byte. Tokens cannot be decoded alone: a character
may span tokens, and decoders treat the first token of a text differently (leading space). So a stream decodes a
short window that starts at a clean border before the new tokens, and yields what the window gained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt tokens that tell the decoder that the text goes on
_PATIENCE = 16  # held tokens after which decoding is retried only as the held run grows by a quarter


class TextDecoder:
    """What detokenisation needs of a tokenizer: of Transformers (fast or slow) or a bare `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._raw = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._is_fast = hasattr(self._raw, "get_added_tokens_decoder")
        added = self._raw.get_added_tokens_decoder() if self._is_fast else tokenizer.added_tokens_decoder
        self.special = frozenset(i for i, token in added.items() if token.special) | frozenset(
            getattr(tokenizer, "all_special_ids", ())
        )
        # A run of byte tokens is decoded as one: until it ends, its text may still turn into replacement characters.
        look_up = self._raw.token_to_id if self._is_fast else tokenizer.convert_tokens_to_ids
        known = (look_up(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_tokens = frozenset(i for i in known if i is not None) - {getattr(tokenizer, "unk_token_id", None)}
        self._contextual = self.byte_tokens | self.special  # tokens whose text alone is not what they add
        self._adds_up = self._is_fast and _adds_up(self._raw.decoder)
        self._alone: dict[int, str] = {}  # text of single tokens, as they are met: at most the vocabulary
        self.pieces: dict[int, str] = {}  # what `piece` said of them, to be read alone

    def exists(self, token_id: int) -> bool:
        """False for the padding of a model's head: ids beyond the tokenizer's, which decode to nothing."""
        if self._is_fast:
            return self._raw.id_to_token(token_id) is not None
        return token_id < len(self._raw)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included, without tidying of spaces."""
        if not token_ids:
            return ""
        if self._is_fast:
            return str(self._raw.decode(list(token_ids), skip_special_tokens=False))
        return str(self._raw.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def alone(self, token_id: int) -> str:
        """`decode([token_id])`, remembered: for tokens that a model chose."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.decode([token_id])
        return text

    def piece(self, token_id: int) -> str:
        """What the token adds to every text that ends with a whole character, or "" where it depends on the text.

        Exact where the decoder joins what it makes of each token (`_adds_up`): then a text that ends with a whole
        character and the text of a token, itself whole, are decoded as if each were alone.
        """
        piece = self.pieces.get(token_id)
        if piece is None:
            piece = ""
            if self._adds_up and token_id not in self._contextual and self.exists(token_id):
                text = self.alone(token_id)
                piece = "" if text.endswith(REPLACEMENT) else text
            self.pieces[token_id] = piece
        return piece


def _adds_up(decoder: Any) -> bool:
    """Does this decoder of `tokenizers` make bytes or text of each token by itself and join them, nothing else?

    Of bytes (GPT-2's scheme) characters are made last. Replacements and byte tokens come before the joining (Gemma's).
    What strips or adds a space at the front (Llama's, Metaspace, WordPiece) does not add up; nor does no decoder at
    all, which joins with spaces.
    """
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    while names and names[0] == "Replace":
        del names[0]
    return names == ["ByteFallback", "Fuse"] or (names == ["ByteLevel"] and len(steps) == 1)


class TextStream:
    """The text that output tokens add to a prompt, in pieces.

    Joined, the pieces are `decode(context + output)` less `decode(context)`, where the context is the last few
    prompt tokens (none when the prompt ends inside a character), special tokens left out if `skip_special`.
    """

    def __init__(self, decoder: TextDecoder, prompt: Sequence[int], *, skip_special: bool) -> None:
        self._decoder = decoder
        self._pieces = decoder.pieces
        self._hidden = decoder.special if skip_special else frozenset()
        self._window = self._clean_context(prompt)  # tokens decoded together: a clean border, then those not yielded
        self._read = decoder.decode(self._window)  # text of the window that was yielded already (or is the prompt's)
        self._fresh = len(self._window)  # index in the window of the first token not yielded
        self._retry_at = 0  # held tokens at which decoding is worth another try

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. What an unfinished character or byte run holds back comes later."""
        if len(token_ids) == 1 and self._fresh == len(self._window):
            token = token_ids[0]
            piece = self._pieces.get(token)
            if piece is None:
                piece = self._decoder.piece(token)
            if piece:  # nothing is held, so the window ends with a whole character
                self._window, self._read, self._fresh = [token], piece, 1
                return piece
        self._window += [t for t in token_ids if t not in self._hidden and self._decoder.exists(t)]
        held = len(self._window) - self._fresh
        if not held or held < self._retry_at or self._window[-1] in self._decoder.byte_tokens:
            return ""
        text = self._decoder.decode(self._window)
        if text.endswith(REPLACEMENT):
            self._retry_at = held + held // 4 if held > _PATIENCE else 0
            return ""
        piece = text[len(self._read) :]
        self._advance()
        return piece

    def flush(self) -> str:
        """What was held back, complete or not. The stream is over."""
        text = self._decoder.decode(self._window)
        piece = text[len(self._read) :]
        self._advance()
        return piece

    def _advance(self) -> None:
        """Let the window start at the tokens just yielded: a clean border, since the text before ends a character."""
        self._window = self._window[self._fresh :]
        alone = len(self._window) == 1
        self._read = self._decoder.alone(self._window[0]) if alone else self._decoder.decode(self._window)
        self._fresh, self._retry_at = len(self._window), 0

    def _clean_context(self, prompt: Sequence[int]) -> list[int]:
        context = [token for token in prompt[-_CONTEXT:] if token not in self._decoder.special]
        while context and context[0] in self._decoder.byte_tokens:
            del context[0]
        if not context or context[-1] in self._decoder.byte_tokens:
            return []
        text = self._decoder.decode(context)
        return [] if not text or text.endswith(REPLACEMENT) else context


class StopStrings:
    """Finds the first stop string in a stream of text, across pieces.

    First means: the one that is complete first, reading character by character; among those that end together,
    the longest. So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""  # the end of the text so far, a proper prefix of some stop string
        self._longest = max(map(len, stops), default=0)

    def push(self, piece: str) -> tuple[str, str | None]:
        """`(text that is certain to stay, the stop string if it was found)`; after that, push no more."""
        if not self._stops or not piece:
            return piece, None
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - n :]
            if any(stop.startswith(tail) for stop in self._stops):
                return n
        return 0


class Detokenizer:
    """The text of one sequence: what to append to it after each token, and whether a stop string ends it."""

    def __init__(
        self,
        decoder: TextDecoder,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(decoder, prompt, skip_special=skip_special)
        self._stops = StopStrings(stop, include=include_stop)
        self._hears = bool(stop)
        self._deaf = min_tokens  # tokens whose text is not searched for stop strings

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """`(text to append, the stop string that ends the sequence or None)`."""
        if not self._hears:
            return self._stream.push(token_ids), None
        heard = token_ids
        quiet = ""
        if self._deaf:
            quiet = self._stream.push(token_ids[: self._deaf])
            heard = token_ids[self._deaf :]
            self._deaf -= min(self._deaf, len(token_ids))
        text, stop = self._stops.push(self._stream.push(heard)) if heard else ("", None)
        return quiet + text, stop

    def finish(self) -> tuple[str, str | None]:
        """What was held back, now that no token follows. It may hold a stop string too."""
        text, stop = self._stops.push(self._stream.flush())
        return (text, stop) if stop is not None else (text + self._stops.flush(), None)
