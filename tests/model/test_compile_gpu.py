"""What Inductor makes of layers for a GPU: kernels that begin early wait before they touch memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from isthmus.kernels.dependent import is_dependent
from isthmus.model.compile import compile_layer

pytestmark = pytest.mark.gpu


def norms(x: Tensor) -> Tensor:
    """A norm, a sum, a norm: of a row that Inductor would read three times."""
    y = x + x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    return y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def filled(x: Tensor) -> Tensor:
    """A kernel that only writes, between others."""
    y = torch.sin(x)
    mask = torch.zeros(len(x), 64, device=x.device).scatter_(1, y[:, :4].topk(2, -1).indices, 1.0)
    return torch.cos(y @ y.T) + mask.sum()


def long(x: Tensor) -> Tensor:
    """Rows longer than a program holds."""
    wide = x.repeat(1, 32)
    out: Tensor = wide / wide.float().pow(2).sum(-1, keepdim=True).sqrt()
    return out


def kernels_of(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Bodies of the Triton kernels that the function is compiled to; its results are the function's."""
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", codes.append)
    torch._dynamo.reset()
    x = torch.randn(5, 2560, device="cuda", dtype=torch.bfloat16)
    with config.patch(force_disable_caches=True), torch.inference_mode():
        found = torch.compile(function, backend=compile_layer, dynamic=True, fullgraph=True)(x)
        torch.testing.assert_close(found, function(x), rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()
    return [body for code in codes for body in re.findall(r"\ndef triton_.*?''', device_str", code, re.DOTALL)]


@pytest.mark.parametrize("function", [norms, filled, long])
def test_kernels_wait_first(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = kernels_of(function, monkeypatch)
    assert bodies
    for body in bodies:
        lines = [line for line in body.splitlines() if re.search(r"tl\.(load|store|atomic)|gdc_", line)]
        if is_dependent():
            assert "gdc_wait" in lines[0], body
            assert sum("gdc_wait" in line for line in lines) == 1
        else:
            assert not any("gdc_" in line for line in lines)


def test_a_row_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (body,) = kernels_of(norms, monkeypatch)
    assert body.count("tl.load(in_") == 1
    assert "for r" not in body
