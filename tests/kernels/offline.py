"""Builds kernels for GPUs that are not here, in a process of its own: Triton's compiler needs none.

    python -m tests.kernels.offline 89 101376

prints, as JSON, the bytes of shared memory that each of `cases` takes on a GPU of compute capability 8.9 whose programs
may have so many; then what its kernels do with memory before they wait for the kernel before them, if they do, in PTX;
then the tiles that a Hopper's products read from shared memory, with the bytes of a row. A launch builds what it would
run, and runs nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from isthmus.kernels import attention, delta_chunks, ssd_chunks
from isthmus.kernels.attention import DecodeItems, PrefillTiles, Workspace, prefill_tile
from isthmus.kernels.causal_conv_decode import causal_conv_decode
from isthmus.kernels.expert_rows import expert_rows
from isthmus.kernels.experts import expert_linear, sort_pairs, work_size
from isthmus.kernels.gated_delta_decode import gated_delta_decode
from isthmus.kernels.linear import config_of, linear
from isthmus.kernels.linear_row import linear_row
from isthmus.kernels.plan import FIELDS
from isthmus.kernels.reference import Scoring
from isthmus.kernels.rglru_decode import rglru_decode
from isthmus.kernels.scan_decode import scan_decode
from isthmus.kernels.ssd_decode import ssd_decode
from isthmus.kernels.top_k import top_k

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
BF16, FP32, FP8, E4M3 = torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float8_e4m3fn


EARLY = (
    "attention",
    "causal_conv_decode",
    "expert_rows",
    "experts",
    "gated_delta_decode",
    "linear",
    "linear_row",
    "rglru_decode",
    "scan_decode",
    "ssd_decode",
    "top_k",
    "write_kv",
)
"""Modules whose kernels may begin before the one before them has ended."""

OPTIONS = ("num_warps", "num_stages", "launch_pdl")
SWIZZLED = re.compile(r"^(#\w+) = #ttg\.nvmma_shared<\{swizzlingByteWidth = (\d+)", re.MULTILINE)
OPERANDS = re.compile(r"memdesc<([^,]+), (#\w+),")
TOUCHES = re.compile(r"\b(ld\.global|st\.global|atom\.global|red\.global|cp\.async\.c[ag])\b|(griddepcontrol\.wait)")


def operands(layouts: str) -> Iterator[tuple[str, int]]:
    """What the products of a kernel, in TTGIR, read from shared memory: shapes, and bytes of a row (128: or more)."""
    widths = {name: int(width) for name, width in SWIZZLED.findall(layouts)}
    for line in layouts.splitlines():
        if "warp_group_dot " in line:
            yield from ((shape, widths[layout]) for shape, layout in OPERANDS.findall(line))


def built(launch: Callable[[], object], capability: int) -> tuple[int, list[str] | None, list[tuple[str, int]]]:
    """The most shared memory that a kernel of this launch takes on a GPU of that capability, in bytes; what comes
    before the one wait of those that have one; and the tiles of its products, as `operands` has them."""
    target, taken, early = GPUTarget("cuda", capability, 32), [0], []
    tiles: set[tuple[str, int]] = set()

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        kernel = triton.compile(source(self, dict(zip(self.arg_names, args, strict=False)) | given), target, options)
        taken.append(kernel.metadata.shared)
        tiles.update(operands(kernel.asm["ttgir"]))
        touches = [found[0] for found in TOUCHES.finditer(kernel.asm["ptx"])]
        if "griddepcontrol.wait" in touches:
            assert touches.count("griddepcontrol.wait") == 1
            early.append(touches[: touches.index("griddepcontrol.wait")])

    run, JITFunction.run = JITFunction.run, build
    try:
        launch()
    finally:
        JITFunction.run = run
    return max(taken), [touch for touches in early for touch in touches] if early else None, sorted(tiles)


def source(kernel: Any, values: dict[str, Any]) -> ASTSource:
    """What a launch with these arguments compiles; tensors and numbers are taken to be as aligned as they can be."""
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values.get(parameter.name)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        signature[parameter.name] = "*" + NAMES[value.dtype] if isinstance(value, Tensor) else number(parameter, value)
        if not parameter.do_not_specialize and (isinstance(value, Tensor) or value % 16 == 0):
            aligned[place,] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def number(parameter: Any, value: float) -> str:
    return "fp32" if isinstance(value, float) else parameter.annotation_type or "i32"


def attends(heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, rows: torch.dtype) -> Iterator[Any]:
    """A decode, a write of rows, a prefill, over pages of `rows`; values of other sizes than keys are their first
    elements."""
    shared = k_dim != v_dim
    query, out = torch.empty(64, heads, k_dim, dtype=dtype), torch.empty(64, heads, v_dim, dtype=dtype)
    row = kv_heads * (k_dim if shared else k_dim + v_dim)
    pages = torch.empty(8 * 16 * row, dtype=torch.uint8 if rows.itemsize == 1 else rows).view(rows)
    keys = pages.as_strided((8, 16, kv_heads, k_dim), (16 * row, kv_heads * k_dim, k_dim, 1))
    values = keys[..., :v_dim]
    if not shared:
        behind = pages[16 * kv_heads * k_dim :]
        values = behind.as_strided((8, 16, kv_heads, v_dim), (16 * row, kv_heads * v_dim, v_dim, 1))
    table, how = torch.zeros(4, 8, dtype=torch.int32), Scoring(0.1, None, None, None)
    work = torch.zeros(8, FIELDS, dtype=torch.int32)
    workspace = Workspace.of(1024, heads, v_dim, "cpu")
    items = DecodeItems(work, torch.zeros(9, dtype=torch.int32))
    yield lambda: attention.decode_attention(query, out, keys, values, table, items, workspace, how, early=True)
    key, value = torch.empty(64, kv_heads, k_dim, dtype=dtype), torch.empty(64, kv_heads, v_dim, dtype=dtype)
    yield lambda: attention.write_kv(key, value, keys, values, torch.zeros(64, dtype=torch.int64), early=True)
    tiles = PrefillTiles(work, prefill_tile(heads // kv_heads, k_dim, v_dim, dtype.itemsize), slots=8)
    yield lambda: attention.prefill_attention(query, out, key, value, keys, values, table, tiles, workspace, how)


def experts(pairs: int, transposed: bool) -> Callable[[], object]:
    """Eight of them."""
    weight = torch.empty(8, *((512, 1024) if transposed else (1024, 512)), dtype=BF16)
    work = torch.zeros(work_size(pairs, 8), dtype=torch.int32)
    x = torch.empty(pairs, 512, dtype=BF16)
    return lambda: expert_linear(x, work, weight, None, top_k=1, transposed=transposed, early=True)


def few_pairs() -> object:
    """Of experts."""
    weight, x = torch.empty(8, 1024, 512, dtype=BF16), torch.empty(1, 512, dtype=BF16)
    return expert_rows(x, torch.zeros(4, dtype=torch.int64), weight, None, top_k=4, early=True)


def few_rows(multiprocessors: int) -> Callable[[], object]:
    """A linear layer of few rows: eight tiles of outputs."""
    counters = torch.zeros(64, dtype=torch.int32)
    x, weight = torch.empty(4, 1024, dtype=BF16), torch.empty(512, 1024, dtype=BF16)
    built = config_of(4, 2)
    assert built is not None
    return lambda: linear(x, weight, None, counters, built, multiprocessors=multiprocessors)


def one_row(outputs: int) -> Callable[[], object]:
    """A linear layer of one row."""
    return lambda: linear_row(torch.empty(1, 2048, dtype=BF16), torch.empty(outputs, 2048, dtype=BF16), None)


def mamba(n_dim: int) -> Callable[[], object]:
    """Chunks of Mamba-2."""
    integers = [torch.zeros(4, dtype=torch.int32) for _ in range(4)]
    pages, starts, ends, which = integers
    where = (pages, torch.zeros(4, dtype=torch.uint8), starts, ends, which)
    rows, out = torch.empty(64, 1, n_dim, dtype=BF16), torch.empty(64, 8, 64, dtype=BF16)
    step, of_heads = torch.empty(64, 8, dtype=BF16), torch.empty(8, dtype=BF16)
    view = torch.empty(4, 8, 64, n_dim)
    rate = torch.empty(8)
    return lambda: ssd_chunks.ssd_chunks(view, where, rows, rows, out, step, of_heads, rate, of_heads, out)


def delta(
    key_heads: int, heads: int, k_dim: int, *, per_channel: bool, dtype: torch.dtype = BF16
) -> Callable[[], object]:
    """Chunks of a delta rule, with decays of heads or of every number of their keys."""
    integers = [torch.zeros(4, dtype=torch.int64) for _ in range(4)]
    pages, starts, ends, which = integers
    where = (pages, torch.zeros(4, dtype=torch.bool), starts, ends, which)
    owner, view = torch.zeros(64, dtype=torch.int64), torch.empty(4, heads, k_dim, 128)
    shapes = (key_heads, k_dim), (heads, 128), (heads,)
    keys, values, beta = (torch.empty(64, *shape, dtype=dtype) for shape in shapes)
    decay = torch.empty(64, heads, *([k_dim] if per_channel else []))
    return lambda: delta_chunks.delta_chunks(view, where, owner, keys, keys, values, decay, beta, values)


def sorting() -> object:
    """Of a step's pairs."""
    return sort_pairs(torch.zeros(64, dtype=torch.int64), 32, 16, early=True)


def states() -> Iterator[tuple[str, Callable[[], object]]]:
    """A token for each of some sequences with states."""
    pages, fresh, tokens = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.bool), torch.zeros(8).long()
    lanes = pages, fresh, tokens
    rows, of_heads = torch.empty(8, 16, 128, dtype=BF16), torch.empty(8, 16, dtype=BF16)
    flat, wide = torch.empty(8, 2048, dtype=BF16), torch.empty(4, 16, 128, 128)
    yield "delta", lambda: gated_delta_decode(wide, *lanes, rows, rows, rows, of_heads, of_heads, rows, early=True)
    saved, taps = torch.empty(4, 3, 2048, dtype=BF16), torch.empty(2048, 4, dtype=BF16)
    yield "convolution", lambda: causal_conv_decode(saved, *lanes, flat, taps, None, flat, early=True)
    given = of_heads, of_heads[0], torch.empty(16), of_heads[0]
    yield "duality", lambda: ssd_decode(wide, *lanes, rows, rows, rows, *given, rows, early=True)
    scanned, small = torch.empty(4, 1, 2048, 16), torch.empty(8, 1, 16, dtype=BF16)
    x, rate, skip = flat[:, None], torch.empty(1, 2048, 16), torch.empty(1, 2048)
    yield "scan", lambda: scan_decode(scanned, *lanes, x, x, small, small, rate, skip, x, early=True)
    yield "recurrence", lambda: rglru_decode(torch.empty(4, 2048), *lanes, flat, flat, flat, early=True)


ROW_OUTPUTS = (2048, 4096, 8192, 16_384)
"""Of linear layers of one row: each build has one."""

# Latent rows of fp32 fit a GPU with 163 KiB; elsewhere the start says so.
HEADS = {
    "64": (64, 8, 64, 64, BF16, BF16),
    "128": (32, 8, 128, 128, BF16, BF16),
    "256": (8, 4, 256, 256, BF16, BF16),
    "256 of fp8": (8, 4, 256, 256, BF16, FP8),
    "64 of fp8": (64, 8, 64, 64, BF16, FP8),
    "128 of fp8": (32, 8, 128, 128, BF16, FP8),
    "512 of fp8": (8, 1, 512, 512, BF16, FP8),
    "latent rows of fp8": (32, 1, 576, 512, BF16, FP8),
    "256 of fp32": (8, 4, 256, 256, FP32, FP32),
    "512 of fp32": (8, 1, 512, 512, FP32, FP32),
    "512": (8, 1, 512, 512, BF16, BF16),
    "latent rows": (32, 1, 576, 512, BF16, BF16),
}

# Ampere has no instructions for this type, and the start refuses it there.
SINCE_ADA = {
    "256 of e4m3": (8, 4, 256, 256, BF16, E4M3),
    "latent rows of e4m3": (32, 1, 576, 512, BF16, E4M3),
}


def cases(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Those that take most of a multiprocessor's shared memory."""
    for name, heads in (HEADS | (SINCE_ADA if capability >= 89 else {})).items():
        decode, write, prefill = attends(*heads)
        yield f"decode {name}", decode
        yield f"write {name}", write
        yield f"prefill {name}", prefill
    yield "decode 16 of fp8", next(attends(8, 4, 16, 16, BF16, FP8))
    for pairs in (8, 512, 8192):
        yield f"experts of {pairs} pairs", experts(pairs, transposed=pairs == 512)
    yield "experts of few pairs", few_pairs
    yield "choice of experts", lambda: top_k(torch.empty(64, 128, dtype=FP32), 8, early=True)
    yield "sorting of pairs", sorting
    yield "linear of few rows", few_rows(132)
    yield "linear of many tiles", few_rows(1)
    for outputs in ROW_OUTPUTS:
        yield f"linear of one row {outputs}", one_row(outputs)
    yield from states()
    for n_dim in (128, 256):
        yield f"Mamba-2 {n_dim}", mamba(n_dim)
    yield "chunks of gated delta 128", delta(2, 4, 128, per_channel=False)
    yield "chunks of gated delta 256", delta(2, 4, 256, per_channel=False)
    yield "chunks of Kimi delta 128", delta(4, 4, 128, per_channel=True)
    yield "chunks of Kimi delta 256 in fp32", delta(4, 4, 256, per_channel=True, dtype=FP32)


if __name__ == "__main__":
    which, room = map(int, sys.argv[1:])
    if which >= 90:
        for name in EARLY:
            vars(sys.modules[f"isthmus.kernels.{name}"])["dependent_launch"] = lambda wanted=True: {
                "DEPENDENT": True, "launch_pdl": True,
            } if wanted else {"DEPENDENT": False}  # fmt: skip
    for module in (attention, delta_chunks, ssd_chunks):
        vars(module)["shared_bytes"] = lambda: room
    print(json.dumps({name: built(launch, which) for name, launch in cases(which)}))
