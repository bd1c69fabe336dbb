"""What a request cost and what it waited for, told when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Receipt:
    """Of one request; counts add up over its `n` continuations, the hit is that of the first to start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again
    restorable: dict[str, int] = field(default_factory=dict)  # per group: tokens that it could have restored by itself
    known_tokens: int = 0  # of the prompt, known to the prefix cache, whether restorable or not
    cut_by: str | None = None  # the group that cut the hit below what is known
    pages: dict[str, int] = field(default_factory=dict)  # per group: fresh pages it took, all steps together
    bytes: int = 0  # of those pages
    waited_seconds: float = 0.0  # in the queue, after preemptions included
    waited_for: dict[str, float] = field(default_factory=dict)  # of that: "rows", "budget", "memory", "prefix"
    preemptions: int = 0

    def take(self, pages: Mapping[str, int], page_bytes: Mapping[str, int]) -> None:
        """Add fresh pages."""
        for name, n in pages.items():
            self.pages[name] = self.pages.get(name, 0) + n
            self.bytes += n * page_bytes[name]
