"""Output that follows a grammar: which tokens may come next, worked out on the CPU while the forward runs.

llguidance (an extra) parses; it is imported when the first request with a grammar comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.params import RequestError


class Grammars:
    """Makes one `Follower` for each sequence that has a grammar.

    Args:
        tokenizer: of Transformers, or a `tokenizers.Tokenizer`.
        vocab_size: tokens the model has.
        eos_token_ids: ids that end a sequence; a grammar that is complete allows only them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: Any = None  # llguidance's view of the vocabulary; takes a second to build
        self._thread = ThreadPoolExecutor(1, "grammar")

    def follow(self, grammar: str) -> Follower:
        """From the start of the grammar. RequestError if it cannot be followed here."""
        library = _llguidance()
        if not self._eos:
            raise RequestError("grammar: the model has no end token, so a grammar can never be complete")
        if self._tokenizer is None:
            known = min(self._vocab_size, self._source.get_vocab_size(with_added_tokens=True))
            self._tokenizer = library.LLTokenizer(
                self._source.to_str(), n_vocab=max(known, *self._eos) + 1, eos_token=self._eos
            )
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"grammar: {matcher.get_error().splitlines()[0][:300]}")
        return Follower(matcher, self._tokenizer.vocab_size, self._vocab_size, self._eos, self._thread)


class Follower:
    """Where one sequence stands in its grammar. Implements `isthmus.engine.step.TokenMask`."""

    def __init__(
        self, matcher: Any, known: int, vocab_size: int, eos_token_ids: Sequence[int], thread: ThreadPoolExecutor
    ) -> None:
        self._matcher = matcher
        self._bits = np.zeros(-(-known // 32), np.int32)
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._thread = thread
        self._filled: Future[None] | None = None

    def prepare(self) -> None:
        """Begin to work out what may come next; returns at once."""
        self._filled = self._thread.submit(self._fill)

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab_size], True for tokens that may come next; waits for `prepare`. Never all False."""
        assert self._filled is not None, "prepare before allowed"
        self._filled.result()
        mask = np.zeros(self._vocab_size, np.bool_)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        mask[: len(bits)] = bits
        if self._matcher.is_error() or not mask.any():
            mask[self._eos] = True  # `accept` reports the error
        return mask

    def accept(self, token_id: int) -> str | None:
        """Go on by a token. What is wrong if the grammar cannot be followed any further, else None."""
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            return f"the grammar failed: {self._matcher.get_error().splitlines()[0][:300]}"
        return None

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        return bool(self._matcher.is_stopped())

    def _fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)


def _llguidance() -> ModuleType:
    try:
        import llguidance  # noqa: PLC0415 (an extra)
    except ImportError:
        raise RequestError("grammar: needs llguidance: pip install 'isthmus[structured]'") from None
    return llguidance
