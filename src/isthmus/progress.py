"""The progress bar of a call: requests done, output tokens per second."""

from __future__ import annotations

import time

from tqdm import tqdm


class Progress:
    """Shown while the context lasts, if it is enabled and somebody may see it."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = tqdm(
            total=total, desc="requests", unit="req", disable=None if enabled else True, dynamic_ncols=True
        )
        self._start = time.perf_counter()
        self._tokens = 0
        self._shown = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._show()
        self._bar.close()

    def end(self, requests: int) -> None:
        """So many are done."""
        self._bar.update(requests)

    def note(self, tokens: int) -> None:
        """A step brought so many, to whomever."""
        self._tokens += tokens
        if time.perf_counter() - self._shown > 0.2:
            self._show()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        rate = self._tokens / max(1e-9, self._shown - self._start)
        self._bar.set_postfix_str(f"{rate:,.1f} output tok/s")
