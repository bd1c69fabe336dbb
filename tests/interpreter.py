"""Triton's interpreter on a new NumPy, and with bfloat16 products."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot


def _patch(tensor: Any, scope: Any) -> None:
    """Triton 3.6 keeps a scalar as an array of one entry, which `int` refuses since NumPy 2.4: loops with bounds
    from memory need this."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


def _wide(x: Any) -> Any:
    if x.dtype != tl.bfloat16:
        return x
    bits = np.asarray(x.data).view(np.uint16).astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
    """Triton 3.6 multiplies the bits of bfloat16 numbers as if they were integers."""
    return _dot(self, _wide(a), _wide(b), *others)


if not torch.cuda.is_available():
    interpreter._patch_lang_tensor = _patch
    interpreter.InterpreterBuilder.create_dot = _create_dot
