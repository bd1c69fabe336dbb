"""Names of full pages: a keyed hash of a page's tokens and of everything before them.

    name[c] = blake2b(key, name[c - 1] + tokens of column c)      16 bytes; name[-1] = blake2b(key, salt)

The key is drawn anew for every cache, so nobody can search for two prefixes with one name; the salt is the root
of its own chain, so two tenants share nothing. The parts have fixed lengths, so no two inputs read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes

import numpy as np
from numpy.typing import NDArray

_NAME_BYTES = 16


class Namer:
    """Makes the chains of one cache: one key, one page size."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.keyed = blake2b(key=token_bytes(blake2b.MAX_KEY_SIZE), digest_size=_NAME_BYTES)
        self.keyed.update(b"\0")  # so that the key's block is behind us, and no name takes it in again

    def root(self, salt: str | None) -> bytes:
        """What the first page of a chain follows: the same for the same salt alone."""
        return self.name(b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass"))

    def name(self, content: bytes) -> bytes:
        """The keyed hash of these bytes."""
        state = self.keyed.copy()
        state.update(content)
        return state.digest()

    def chain(self, last: bytes, content: bytes, page_bytes: int) -> list[bytes]:
        """The names of pages with this content, the first of which follows the one with the name `last`."""
        copy, names = self.keyed.copy, list[bytes]()
        for start in range(0, len(content), page_bytes):  # thousands: as few calls for each as there can be
            state = copy()
            state.update(last + content[start : start + page_bytes])
            last = state.digest()
            names.append(last)
        return names


class Names:
    """The names of one sequence's full pages, made as its tokens come. `pages[c]` names column c and all before it."""

    def __init__(self, namer: Namer, salt: str | None) -> None:
        self.pages: list[bytes] = []
        self._namer = namer
        self._root = namer.root(salt)

    @property
    def tokens(self) -> int:
        """How many tokens are named: the ones `extend` wants next start here."""
        return len(self.pages) * self._namer.page_size

    def extend(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Name the full pages among the tokens that follow those named so far; a remainder is left for later."""
        size = self._namer.page_size
        whole = np.asarray(tokens[: len(tokens) - len(tokens) % size], np.int32)
        last = self.pages[-1] if self.pages else self._root
        self.pages += self._namer.chain(last, whole.tobytes(), size * whole.itemsize)


def extend_each(chains: Sequence[Names], tokens: NDArray[np.int32]) -> None:
    """The same for many of one cache at once: chain i is named one full page more, the tokens `[i, page_size]`."""
    copy = chains[0]._namer.keyed.copy
    contents: list[bytes] = tokens.view(f"V{tokens.shape[1] * tokens.itemsize}")[:, 0].tolist()
    for names, content in zip(chains, contents, strict=True):  # hundreds at a time
        pages, state = names.pages, copy()
        state.update((pages[-1] if pages else names._root) + content)
        pages.append(state.digest())
