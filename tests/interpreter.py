"""Triton's interpreter on a new NumPy, with bfloat16 products and rounding, and several times as fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_all = interpreter._patch_lang
_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
_dot = interpreter.InterpreterBuilder.create_dot
_binary = interpreter.InterpreterBuilder.binary_op
_convert = interpreter._convert_float
_cast = interpreter.InterpreterBuilder.cast_impl
_ROUNDED = {
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
}
"""As what they are computed, and kept."""


def _patch(tensor: Any, scope: Any) -> None:
    """Triton 3.6 keeps a scalar as an array of one entry, which `int` refuses since NumPy 2.4: loops with bounds
    from memory need this."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


def _nothing() -> None:
    """A function that sees the whole of Triton's language."""


@cache
def _patches() -> list[tuple[Any, str, Any]]:
    """What Triton 3.6 replaces in its language while a kernel runs: the same for each."""
    scope = _patch_all(FunctionType(_nothing.__code__, {"tl": tl, "core": tl.core}))
    found = [(holder, name, vars(holder)[name]) for holder, name, _ in scope._changes]
    scope.restore()
    return found


def _patch_lang(kernel: Callable[..., Any]) -> Any:
    """Triton 3.6 goes through its language at every call of a function of a kernel, though the launch has replaced
    everything by then. That took more than half of the interpreter's time."""
    scope = interpreter._LangPatchScope()
    if tl.core.is_builtin(tl.load):
        for patch in _patches():
            scope.set_attr(*patch)
    return scope


def _check_overflow(self: Any, *operation: Any) -> None:
    """Triton 3.6 computes every sum and product again, wide, for an assertion that only debugging makes."""
    if self.builder.options.debug:
        _overflow(self, *operation)


def _wide(x: Any) -> Any:
    if x.dtype != tl.bfloat16:
        return x
    bits = np.asarray(x.data).view(np.uint16).astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
    """Triton 3.6 multiplies the bits of bfloat16 numbers as if they were integers."""
    return _dot(self, _wide(a), _wide(b), *others)


def _binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
    """Triton 3.6 adds and compares the bits of such numbers as if they were integers."""
    if left.dtype.scalar in _ROUNDED:
        raise TypeError(f"{left.dtype.scalar} numbers must be made wider before anything is computed with them")
    return _binary(self, left, right, operation)


def _convert_float(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Triton 3.6 rounds towards zero to bfloat16; to fp8 it drops the carry of a rounded significand (0.49 becomes
    0.25), and cuts subnormal numbers off; back from fp8 it makes numbers of NaN."""
    if wanted in (tl.float32, tl.float16) and given in _ROUNDED:
        dtype, kept = _ROUNDED[given]
        bits = np.ascontiguousarray(data).view(torch.empty(0, dtype=kept).numpy().dtype)
        return torch.from_numpy(bits).view(dtype).to(getattr(torch, wanted.name.replace("fp", "float"))).numpy()
    if given != tl.float32 or wanted not in _ROUNDED:
        return _convert(data, given, wanted, rounding)
    dtype, kept = _ROUNDED[wanted]
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
    return numbers.to(dtype).view(kept).numpy()


def _cast_impl(self: Any, given: Any, wanted: Any) -> Any:
    """Triton 3.6 takes whole numbers for the bits of bfloat16 ones, and the other way round."""
    for one, other in ((given.dtype.scalar, wanted.scalar), (wanted.scalar, given.dtype.scalar)):
        if one == tl.bfloat16 and other.is_int():
            given = _cast(self, given, tl.float32)
    return _cast(self, given, wanted)


if not torch.cuda.is_available():
    interpreter._patch_lang_tensor = _patch
    interpreter._patch_lang = _patch_lang
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.binary_op = _binary_op
    interpreter.InterpreterBuilder.cast_impl = _cast_impl
    interpreter._convert_float = _convert_float
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
