"""What sequences take from the prefix cache and leave in it.

    match -> start    a sequence starts: what is cached of it, and where its prefill chunks end besides
    share, keep       steps were planned: full pages become the cache's, boundaries somebody may come back to are kept

Without a cache nothing is found and nothing is left.

A page may be shared once all its tokens are here and the step that computes it was handed out, and before a window
passes it: whatever reads it later runs later. A state page holds the state at `past` for whatever runs next, so its
snapshot is taken there, before the next step of that sequence is planned, or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

import numpy as np

from isthmus.cache.names import extend_each
from isthmus.cache.prefix import Match, PrefixCache
from isthmus.engine.placement import Placement
from isthmus.engine.running import Running
from isthmus.engine.sequence import Sequence, Status


class Sharing:
    """Between the sequences of one scheduler and its prefix cache, if there is one."""

    def __init__(self, cache: PrefixCache | None, placement: Placement) -> None:
        self._cache = cache
        self._placement = placement
        self._page_size = 1 if cache is None else cache.roles.page_size

    def match(self, sequence: Sequence) -> Match | None:
        """What the cache has of a sequence that is about to start. Prompt logprobs need the prompt computed."""
        if self._cache is None or sequence.cold or sequence.request.params.prompt_logprobs is not None:
            return None
        if sequence.names is None:
            sequence.names = self._cache.names(sequence.request.cache_salt)
        names, known = sequence.names, sequence.known
        if names.tokens + self._page_size <= known:
            names.extend(sequence.packed(names.tokens, known))
        if sequence.match is None or sequence.matched != known or not self._cache.still(sequence.match):
            sequence.match, sequence.matched = self._cache.match(names, known), known
        return sequence.match

    def start(self, sequence: Sequence, match: Match | None) -> tuple[int, tuple[int, ...]]:
        """It starts from that hit; the first of a request's sequences to do so is the one its receipt tells of.

        Returns how many tokens of it are cached, and where its prefill chunks end besides.
        """
        past, cuts = self.outset(sequence, match)
        receipt = sequence.request.receipt
        if match is not None and not receipt.restorable:
            receipt.cached_tokens = min(past, len(sequence.prompt))
            receipt.restorable = dict(match.per_kind)
            receipt.known_tokens = match.known * self._page_size
            receipt.cut_by = match.cut_by
        sequence.match = None
        return past, cuts

    def outset(self, sequence: Sequence, match: Match | None) -> tuple[int, tuple[int, ...]]:
        """What `start` would return."""
        if match is None:
            return 0, ()
        past = match.columns * self._page_size
        return past, self._cuts(past, sequence.length, match)

    def is_coming(self, sequence: Sequence, starting: Mapping[Sequence, int]) -> bool:
        """Is a sibling about to compute the prompt of this waiting sequence? `starting`: those that are about to run,
        with their cached tokens."""
        first = sequence.request.sequences[0]
        if self._cache is None or sequence is first or self._page_size >= len(first.prompt):
            return False
        past = first.past if first.status is Status.RUNNING else starting.get(first, len(first.prompt))
        return past < len(first.prompt)

    def catch_up(self, running: Running) -> bool:
        """Share all full pages of those that run; were there any?"""
        if self._cache is None or not running:
            return False
        behind = self._placement.to_share(running.rows, running.at.here(running.rows)).tolist()
        sharing = [sequence for sequence in running.some(behind) if sequence.names is not None]
        if sharing:
            self.share(sharing)
            self.save()
        return bool(sharing)

    def leave(self, sequences: Items[Sequence]) -> None:
        """They are about to run no more: what they have computed stays, and somebody may come back to their ends."""
        self.share(sequences)
        for sequence in sequences:
            self.keep(sequence)
        self.save()

    def share(self, sequences: Iterable[Sequence]) -> None:
        """Full pages of these running sequences become the cache's, as far as their tokens are here."""
        named = [(sequence, names) for sequence in sequences if (names := sequence.names) is not None]
        if not named:
            return
        at, chains, size = named[0][0].at, [names for _, names in named], self._page_size
        assert at is not None, "only those that run have pages to share"
        rows = np.array([sequence.row for sequence, _ in named], np.int64)
        start, end = np.array([len(names.pages) for names in chains], np.int64) * size, at.here(rows)
        pages = (end - start) // size
        decoded = (pages == 1) & at.has_recent(rows, start)
        which = decoded.nonzero()[0]
        if len(which):
            some = chains if len(which) == len(chains) else [chains[i] for i in which.tolist()]
            extend_each(some, at.recent(rows[which], start[which], size))
        for i in ((pages > 0) & ~decoded).nonzero()[0].tolist():
            chains[i].extend(named[i][0].tokens(int(start[i]), int(end[i])))
        self._placement.share(rows, end, chains)

    def keep(self, sequence: Sequence) -> None:
        """Somebody may come back to where this sequence is, whose pages are shared."""
        if self._cache is None or sequence.names is None or not sequence.past:
            return
        if sequence.past <= sequence.known:
            self._placement.keep(sequence.row, sequence.past, sequence.names)
        else:  # its state has taken in a token that is not here, so that nobody can name the place
            self._cache.keep(sequence.names, sequence.known // self._page_size)

    def want(self, match: Match | None) -> None:
        """A sequence is refused memory that would start from this."""
        if self._cache is not None and match is not None and match.columns:
            self._cache.want(match)

    def save(self) -> None:
        """Take the snapshots of those that are kept, before anything else is planned."""
        self._placement.save()

    def _cuts(self, past: int, length: int, match: Match) -> tuple[int, ...]:
        """Where its prefill chunks end besides, so that somebody can come back: at a branch; with states, at the last
        boundary of what it has, where they must be saved on the spot."""
        cuts = {match.branch * self._page_size}
        if self._cache is not None and self._cache.roles.states:
            cuts.add((length - 1) // self._page_size * self._page_size)
        return tuple(sorted(cut for cut in cuts if past < cut < length))
