"""Chunks by fla-core: what it is given, and that it is our rule. On a CPU something stands in for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.library import stand_ins
from torch import Tensor

from isthmus.kernels import fla_chunks
from isthmus.kernels.fla_chunks import CHUNK, Packed, pack, put_states, take_states
from isthmus.kernels.states import Int64, state_view
from isthmus.kernels.take_heads import put_heads, take_heads
from isthmus.memory import Group, state_spec
from isthmus.model.device_states import LIBRARY, OPERATIONS, DeviceStates, DeviceStep, _upload, chunk_library

RULES = ("gated_delta_rule", "kimi_delta_rule")
COUNTS = (1, 5, 64, 1, 2, 130, 1, 7)
PAST = (3, 0, 9, 0, 1, 0, 6, 4)
SEVERAL = [n for n in COUNTS if n > 1]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Error over size. Queries and keys are rounded at unit length, and so is what the library keeps of a chunk."""


@pytest.mark.parametrize("most", [1, 2, 99])
def test_sequences_are_packed_as_by_hand(most: int) -> None:
    start = np.cumsum([0, *COUNTS])
    longer = [i for i, n in enumerate(COUNTS) if n > 1]
    packs = pack(start, most)
    assert [list(pack[3]) for pack in packs] == [longer[i : i + most] for i in range(0, len(longer), most)]
    for chunks, bounds, tokens, sequences in packs:
        counts = [COUNTS[i] for i in sequences]
        assert bounds.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
        assert tokens.tolist() == [t for i in sequences for t in range(start[i], start[i + 1])]
        assert chunks.tolist() == [[i, j] for i, n in enumerate(counts) for j in range(len(range(0, n, CHUNK)))]
        assert chunks.size * chunks.itemsize % 16 == 0, "what follows it begins where kernels are compiled for"
    assert pack(np.arange(5), most) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(3, 20), (1, 64)])
def test_heads_of_some_tokens(device: str, heads: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, heads + 1, width, device=device).to(dtype)[:, :heads]
    tokens = torch.arange(40, 290, device=device)[torch.arange(250) % 7 != 0]
    assert torch.equal(take_heads(x, tokens), x[tokens])
    unit = take_heads(x, tokens, unit=True)
    expected = x[tokens].float() / (x[tokens].float().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(unit, expected.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)
    out = torch.zeros(300, heads, width, dtype=dtype, device=device)
    put_heads(out, tokens, unit)
    assert torch.equal(out[tokens], unit)
    assert int(out.abs().sum(-1).count_nonzero()) == len(tokens) * heads


@pytest.mark.parametrize("shape", [(3, 20, 12), (2, 64, 128)])
def test_states_of_members(device: str, shape: tuple[int, int, int]) -> None:
    """Fresh ones and padding's are zeros whatever their pages hold; padding's are not put back."""
    group = Group("state", state_spec([("0.x", (3,), "bfloat16"), ("1.x", shape, "float32")]), "state")
    arena = torch.full((8 * group.spec.page_bytes,), 0xFF, dtype=torch.uint8, device=device)
    view = state_view(arena, group, "1.x")
    view[[5, 2]] = known = torch.arange(2.0 * view[0].numel(), device=device).view(2, *shape)
    pages = torch.tensor([5, 3, 2, 0, 0], device=device)
    fresh = torch.tensor([False, True, False, False, True], device=device)
    bounds, none = torch.tensor([0, 2, 6, 70, 71, 71], device=device), torch.zeros(0, device=device)
    packed = Packed(none, bounds, none, pages, fresh, whole=False)
    states = take_states(view, packed)
    assert states.shape == (5, *shape)
    assert torch.equal(states[[0, 2]], known)
    assert int(states[[1, 3]].count_nonzero()) == 0
    states[:4] = new = 1 + torch.rand(4, *shape, device=device)
    put_states(view, packed, states)
    assert torch.equal(view[[5, 3, 2]], new[:3])
    assert view[[0, 1, 4, 6, 7]].isnan().all()


@dataclass
class Case:
    """One step over pages of NaN."""

    step: DeviceStep
    view: Tensor
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        device: str,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        counts: tuple[int, ...] = COUNTS,
    ) -> Case:
        """shape: key heads, heads, K, V."""
        draw = torch.Generator().manual_seed(0)
        key_heads, heads, k_dim, v_dim = shape
        group = Group("state", state_spec([("0.x", (3,), "bfloat16"), ("1.x", shape[1:], "float32")]), "state")
        arena = torch.full(((len(counts) + 3) * group.spec.page_bytes,), 0xFF, dtype=torch.uint8)
        view = state_view(arena, group, "1.x")
        pages, past = np.arange(len(counts), 0, -1), np.array(PAST[: len(counts)])
        known = pages[past > 0]
        view[known] = torch.randn(len(known), *shape[1:], generator=draw)
        total = sum(counts)
        sizes = [key_heads * k_dim, key_heads * k_dim, heads * v_dim]
        query, key, value = torch.split(torch.randn(total, sum(sizes), generator=draw).to(dtype).to(device), sizes, 1)
        channels = (k_dim,) if name == "kimi_delta_rule" else ()
        decay = -0.2 * torch.rand(total, heads, *channels, generator=draw)
        beta = torch.rand(total, heads, generator=draw).to(dtype)
        rows = ((query, k_dim), (key, k_dim), (value, v_dim))
        parts = tuple(torch.unflatten(x, 1, (-1, width)) for x, width in rows)
        view, step = state_view(arena.to(device), group, "1.x"), _step(device, np.cumsum([0, *counts]), past, pages)
        return cls(step, view, (*parts, decay.to(device), beta.to(device)))

    def run(self, name: str, library: bool) -> tuple[Tensor, Tensor]:
        """Outputs, and states of the sequences."""
        out = (LIBRARY if library else OPERATIONS)[name].run(self.step, self.view, *self.inputs)
        assert self.view[[0, -1]].isnan().all()
        return out, self.view[self.step.pages]


def _step(device: str, start: Int64, past: Int64, pages: Int64) -> DeviceStep:
    counts = np.diff(start)
    arrays = (pages, past == 0, start[:-1], start[1:] - 1, np.flatnonzero(counts == 1), np.flatnonzero(counts > 1))
    page, fresh, first, last, decodes, chunks = (torch.from_numpy(x).to(device) for x in arrays)
    return DeviceStep(start, page, fresh, first, last, decodes, chunks, partial(_upload, torch.device(device)))


def error(given: Tensor, expected: Tensor) -> float:
    return float((given.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("counts", [COUNTS, (5, 64, 3)])
@pytest.mark.parametrize("most", [2, 99])
def test_library_and_decodes_in_one_step(
    name: str, counts: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tokens are whose, which states are zero, and that decodes are there too."""
    monkeypatch.setattr(fla_chunks, "forwards", stand_ins)
    monkeypatch.setattr(fla_chunks, "MEMBERS", most)
    shape, dtype = (2, 6, 12, 20), torch.float16
    (out, states), expected = (
        Case.of("cpu", name, dtype, shape, counts).run(name, library) for library in (True, False)
    )
    assert out.dtype == expected[0].dtype
    assert error(out, expected[0]) < TOLERANCE[dtype]
    for given, right in zip((*out, *states), (*expected[0], *expected[1]), strict=True):
        assert error(given, right) < 4 * TOLERANCE[dtype]  # each token, each sequence


def test_what_it_does_not_take_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, in which the library would be imprecise, and very wide keys."""
    monkeypatch.setattr(fla_chunks, "forwards", dict)
    for dtype, shape in ((torch.float32, (1, 2, 12, 20)), (torch.bfloat16, (1, 1, 260, 8))):
        out, states = Case.of("cpu", RULES[0], dtype, shape).run(RULES[0], True)
        expected = Case.of("cpu", RULES[0], dtype, shape).run(RULES[0], False)
        assert torch.equal(out, expected[0])
        assert torch.equal(states, expected[1])


def test_what_is_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    version: str | None = "0.6.0"
    monkeypatch.setattr(fla_chunks, "version", lambda: version)
    assert chunk_library(torch.bfloat16) == "fla-core 0.6.0"
    assert chunk_library(torch.float32) == "torch (fla-core is not for float32)"
    version = "0.9.1"
    assert chunk_library(torch.bfloat16) == "torch (fla-core 0.9.1 is not one of 0.5, 0.6: pip install 'isthmus[fla]')"
    version = None
    assert chunk_library(torch.bfloat16) == "torch (fla-core is not installed: pip install 'isthmus[fla]')"


@pytest.mark.parametrize(
    ("on_gpu", "version", "operations"),
    [
        (True, "0.6.0", LIBRARY),
        (True, "0.5.2", LIBRARY),
        (True, "0.9.1", OPERATIONS),
        (True, None, OPERATIONS),
        (False, "0.6.0", OPERATIONS),
    ],
)
def test_the_library_is_used_where_it_can_be(
    on_gpu: bool, version: str | None, operations: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla_chunks, "version", lambda: version)
    view: Any = SimpleNamespace(is_cuda=on_gpu)
    assert DeviceStates({0: {"recurrent": view}})._operations is operations


needs_library = pytest.mark.skipif(fla_chunks.version() is None, reason="fla-core is not installed (isthmus[fla])")


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(16, 16, 128, 128), (2, 4, 64, 128), (1, 2, 256, 64)])
def test_library_is_our_rule(name: str, shape: tuple[int, int, int, int]) -> None:
    """In bf16, on outputs and states; and again, when nothing is left to compile, without a look at the device."""
    case, ours = (Case.of("cuda", name, torch.bfloat16, shape) for _ in range(2))
    (out, states), expected = case.run(name, True), ours.run(name, False)
    assert error(out, expected[0]) < TOLERANCE[torch.bfloat16]
    assert error(states, expected[1]) < TOLERANCE[torch.bfloat16]
    again = Case.of("cuda", name, torch.bfloat16, shape)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            LIBRARY[name].run(again.step, again.view, *again.inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again.view[again.step.pages], states)
