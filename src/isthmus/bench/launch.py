"""A server of its own for a bench: started, waited for, and stopped however the bench ends."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from isthmus.errors import ConfigError

_PATIENCE = 60.0  # seconds a server gets to stop
_KV_TOKENS = re.compile(r"([\d,]+) tokens fit in sequences")


@dataclass(frozen=True)
class Launched:
    """A server that answers."""

    url: str  # http://host:port
    log: Path  # its standard error, there until the server is stopped
    process: subprocess.Popen[str]
    startup_seconds: float

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that fit, by the certificate in its log; None if it printed none."""
        found = _KV_TOKENS.search(self.log.read_text(errors="replace"))
        return None if found is None else int(found[1].replace(",", ""))

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        return _last_line(self.log)


@contextlib.contextmanager
def launched(command: Sequence[str], what: str) -> Iterator[Launched]:
    """Run a command that prints `... on http://host:port` once it serves; stop it at the end.

    ConfigError with the last line of its log if it ends before that. `what` names the server there.
    """
    start = time.perf_counter()
    with TemporaryDirectory(prefix="isthmus-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as errors:
            process = _popen(command, errors.fileno(), what)
        try:
            url = _wait_for_url(process)
            if url is None:
                raise ConfigError(f"the {what} server did not start: {_last_line(log)}")
            yield Launched(url, log, process, time.perf_counter() - start)
        finally:
            _stop(process)


def _popen(command: Sequence[str], errors: int, what: str) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    except OSError as error:
        raise ConfigError(f"the {what} server did not start: {command[0]}: {error.strerror}") from error


def _wait_for_url(process: subprocess.Popen[str]) -> str | None:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://\S+", line)
        if found is not None:
            return found[0].rstrip("/")
    process.wait()
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask twice: the second signal tells a server that still drains to end at once."""
    for _ in range(2):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE / 2)
            break
    process.kill()  # nothing happens if it has ended
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("isthmus: error: ") if lines else "it said nothing"
