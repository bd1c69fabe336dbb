"""As much of a server as `bench ab` asks for, without an engine.

    python -m tests.server.toy_server FOLDER HOW serve ...

HOW says what goes wrong, on the unified side alone unless it is `refuse` or `start`. Its pid is left in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

POOL = {
    "arena_bytes": 1600,
    "groups": [
        {"name": "full", "page_bytes": 16, "table_entries": 101, "moved_pages": 0},
        {"name": "window", "page_bytes": 160, "table_entries": 101, "moved_pages": 3},
    ],
    "ids": {"live": 0, "capacity": 100},
    "preemptions": 0,
}
LONG = 1000.0


class Handler(BaseHTTPRequestHandler):
    """Answers every prompt with its last word."""

    folder: Path
    how = "well"
    left = 6  # answers before it dies, for `die`

    def do_GET(self) -> None:
        self._send(200, POOL if self.path == "/v1/pool" else {"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, tokens = body["prompt"].split()[-2], 1
        if self.how == "hang":
            (self.folder / "asked").touch()
            time.sleep(LONG)
        if self.how == "refuse":
            return self._send(400, {"error": {"message": "prompt: too long for this toy"}})
        if self.how == "text" and "third" in body["prompt"]:
            text = text[:2] + "?"
        if self.how == "tokens":
            tokens = 2
        if self.how == "die":
            type(self).left -= 1
            if self.left < 0:
                print("IndexError: index 7 is out of bounds", file=sys.stderr, flush=True)
                os._exit(1)
        choice = {"text": text, "finish_reason": "length"}
        self._send(200, {"choices": [choice], "usage": {"completion_tokens": tokens, "prompt_tokens": 20}})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _send(self, status: int, data: Any) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve until killed."""
    folder, how, *command = sys.argv[1:]
    side = command[command.index("--memory") + 1]
    with (Path(folder) / "started").open("a") as started:
        started.write(f"{side} {os.getpid()}\n")
    if how == "start":
        sys.exit("some warning\nisthmus: error: --device cuda: there is no GPU\n")
    if side == "unified" or how == "refuse":
        Handler.folder, Handler.how = Path(folder), how
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print("1,234 tokens fit in sequences of up to 99", file=sys.stderr, flush=True)
    print(f"isthmus: serving toy on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
