"""What Inductor makes of layers for a GPU: kernels let the next begin and wait before they touch memory, and rows
are read once. Their code is looked at for a GPU that need not be here, and run on one that is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config

from isthmus.model.compile import compile_layer
from tests.model.pretended_hopper import CASES


@pytest.fixture(scope="module")
def bodies() -> dict[str, list[str]]:
    """Of the kernels of every case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.pretended_hopper"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_kernels_let_the_next_begin_and_wait_first(bodies: dict[str, list[str]], case: str) -> None:
    """Outside of any loop, whose first loads may be asked for ahead of it."""
    assert bodies[case]
    for body in bodies[case]:
        lines = [line for line in body.splitlines() if re.search(r"tl\.(load|store|atomic)|gdc_|^\s*for ", line)]
        assert "gdc_launch_dependents" in lines[0], body
        assert "gdc_wait" in lines[1], body
        assert sum("gdc_" in line for line in lines) == 2, body


def test_a_row_is_read_once(bodies: dict[str, list[str]]) -> None:
    (body,) = bodies["norms"]
    assert body.count("tl.load(in_") == 1
    assert not re.search(r"^\s*for ", body, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_compiled_as_it_is(case: str) -> None:
    function, shape = CASES[case]
    torch._dynamo.reset()
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x[:, :64] = torch.randperm(64) / 16 - 2  # of equal numbers torch chooses any
    with config.patch(force_disable_caches=True), torch.inference_mode():
        expected = function(x.clone())
        found = torch.compile(function, backend=compile_layer, dynamic=True, fullgraph=True)(x.clone())
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
