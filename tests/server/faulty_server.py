"""`isthmus serve` with the founding bug in its unified memory: the same command line, another engine process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from isthmus import cli
from isthmus.server import engine_process


class _Starter:
    """Stands for asyncio in `engine_process`, and starts the faulty worker where the real one is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def create_subprocess_exec(self, program: str, *command: str, **options: Any) -> asyncio.subprocess.Process:
        assert command == ("-m", "isthmus.server.worker")
        return await asyncio.create_subprocess_exec(program, "-m", "tests.server.faulty_worker", **options)


if __name__ == "__main__":
    if sys.argv[sys.argv.index("--memory") + 1] == "unified":
        vars(engine_process)["asyncio"] = _Starter()
    sys.exit(cli.main())
