"""`isthmus serve` with another module as its engine process: the same command line, the same front.

python -m tests.server.other_worker MODULE serve ...
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from isthmus import cli
from isthmus.server import engine_process


class _Starter:
    """Stands for asyncio in `engine_process`, and starts the other module where the real one is asked for."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def create_subprocess_exec(self, program: str, *command: str, **options: Any) -> asyncio.subprocess.Process:
        assert command == ("-m", "isthmus.server.worker")
        return await asyncio.create_subprocess_exec(program, "-m", self._module, **options)


def use(module: str) -> None:
    """From now on engine processes of this front are that module."""
    vars(engine_process)["asyncio"] = _Starter(module)


if __name__ == "__main__":
    use(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
