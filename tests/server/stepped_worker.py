"""The engine process, which takes a step only when it is let, so that steps can be counted from outside.

The named pipe `STEPS` (environment) has a line for each step: how many orders have been sent by then, which are waited
for when the step is over. When the pipe is closed it runs freely.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import zmq

from isthmus.engine.core import Engine
from isthmus.engine.output import RequestOutput
from isthmus.server import worker


class PatientSocket:
    """Orders that have been sent are there, however long they take."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.due = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, flags: int = 0) -> bytes:
        """The next order; `NOBLOCK` holds once those that are due were received."""
        if self.due:
            self.due, flags = self.due - 1, 0
        return self._socket.recv(flags)


class Service(worker.Service):
    """An engine that also obeys the pipe."""

    def serve(self, socket: Any) -> None:
        """Never returns."""
        with open(os.environ["STEPS"]) as steps:
            patient = PatientSocket(socket)
            self.engine = SteppedEngine(self.engine, steps, patient)  # type: ignore[assignment]
            super().serve(patient)  # type: ignore[arg-type]


class SteppedEngine:
    """Waits within a step until it is let."""

    def __init__(self, engine: Engine, steps: Any, socket: PatientSocket) -> None:
        self._engine = engine
        self._steps = steps
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[RequestOutput]:
        """A step, if there is anything to do."""
        if self._engine.has_work:
            self._socket.due = int(self._steps.readline() or 0)
        return self._engine.step()


if __name__ == "__main__":
    vars(worker)["Service"] = Service
    sys.exit(worker.main())
