"""`isthmus serve` with the founding bug in its unified memory: the same command line, another engine process."""

from __future__ import annotations

import sys

from isthmus import cli
from tests.server import other_worker

if __name__ == "__main__":
    if sys.argv[sys.argv.index("--memory") + 1] == "unified":
        other_worker.use("tests.server.faulty_worker")
    sys.exit(cli.main())
