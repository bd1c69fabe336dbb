"""Every kernel can be built for the GPUs that people have, and takes no more shared memory than a program may there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPUS = {"89": (99 << 10, "GeForce RTX 30 to 50, L4, L40S"), "80": (163 << 10, "A100")}
"""By compute capability: what a program may have. (8.6 and 12.0 have as much as 8.9.)"""


@pytest.mark.parametrize("capability", GPUS)
def test_builds_fit_into_shared_memory(capability: str) -> None:
    room, _ = GPUS[capability]
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.offline", capability, str(room)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=without,
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert min(taken.values()) > 0
    assert {name: size for name, size in taken.items() if size > room} == {}
