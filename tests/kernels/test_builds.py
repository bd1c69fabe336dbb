"""Every kernel can be built for the GPUs that people have, takes no more shared memory than a program may there, and
asks for no product that is known to come out wrong (see `isthmus.kernels.delta_chunks`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kernels.offline import ROW_OUTPUTS

from isthmus.kernels.linear_row import row_config

GPUS = {
    "89": (99 << 10, "GeForce RTX 30 to 50, L4, L40S"),
    "80": (163 << 10, "A100"),
    "90": (227 << 10, "H100, H200"),
}
"""By compute capability: what a program may have. (8.6 and 12.0 have as much as 8.9.)"""

AT_ONCE = {"choice", "experts", "sorting"}
"""What waits before it does anything."""

READS = {"linear of few rows": 2 * 64 * 128 // 8 // 128, "linear of many tiles": 0}
"""What a thread of 128 has before it waits, by 8 numbers: two blocks of weights, if all programs run at once."""

ROW_READS = {
    f"linear of one row {outputs}": config.ahead * config.block_n * config.block_k // 8 // 128
    for outputs in ROW_OUTPUTS
    for config in [row_config(outputs)]
}

EARLY = AT_ONCE | {"convolution", "decode", "delta", "duality", "linear", "recurrence", "scan", "write"}
"""What begins before the kernel before it has ended, where the GPU can."""

Builders = dict[str, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def builders() -> Iterator[Builders]:
    """For each GPU a process that builds for it, all at once: nothing here takes longer on a fresh machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found: Builders = {}
    try:
        for capability, (room, _) in GPUS.items():
            found[capability] = subprocess.Popen(
                [sys.executable, "-m", "tests.kernels.offline", capability, str(room)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
                env=environment,
            )
        yield found
    finally:
        for builder in found.values():
            builder.kill()
            builder.communicate()


@pytest.mark.parametrize("capability", GPUS)
def test_builds_are_such_as_can_run(capability: str, builders: Builders) -> None:
    room, _ = GPUS[capability]
    out, errors = builders[capability].communicate()
    assert builders[capability].returncode == 0, errors
    built = json.loads(out)
    taken = {name: size for name, (size, *_) in built.items()}
    assert max(taken.values()) > 0
    assert {name: size for name, size in taken.items() if size > room} == {}
    tiles = [(name, shape, width) for name, (*_, operands) in built.items() for shape, width in operands]
    assert (tiles != []) == (capability == "90"), "these products are Hopper's"
    assert [tile for tile in tiles if tile[2] < 128] == []
    early = {name: touches for name, (_, touches, _) in built.items() if touches is not None}
    assert {name.split()[0] for name in early} == (EARLY if capability == "90" else set())
    for name, reads in (READS | ROW_READS).items() if early else ():
        assert early[name] == ["ld.global"] * reads, f"{name}: weights come early, and nothing else"
    for name, touches in early.items():
        allowed = set() if name.split()[0] in AT_ONCE else {"ld.global"}
        assert set(touches) <= allowed, f"{name}: what others write is read late"
