"""Reading a GGUF file: metadata, the tensor table, and tensors row by row as floats.

gguf-py gives the constants and the dequantisation. The header is read here: its reader makes an array of every
element of every vocabulary array, ten seconds for the 262,144 tokens of Gemma 3, and reports a damaged file as an
index error. The format is documented at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, dequantize

from isthmus.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_CHUNK_BYTES = 32 << 20
"""Dequantised bytes per chunk: large enough for NumPy, small enough that peak memory is not the embedding."""

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

_EXACT_AS_STORED = {GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file, not read yet."""

    name: str
    shape: tuple[int, ...]  # as torch states it: rows first, the stored (fastest) dimension last
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]  # [rows, bytes per row], a view of the mapped file

    @property
    def safetensors_dtype(self) -> str:
        """The narrowest safetensors dtype that holds every value exactly: F16, BF16 or F32."""
        return _EXACT_AS_STORED.get(self.kind, "F32")

    @property
    def readable(self) -> bool:
        """Whether gguf-py can dequantise this type."""
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[self.kind][1]), np.uint8), self.kind)
        except NotImplementedError:
            return False
        return True

    def chunks(self, rows: npt.NDArray[np.intp] | None = None) -> Iterator[npt.NDArray[Any]]:
        """The values in `safetensors_dtype` (half types as their bytes), some rows at a time.

        Args:
            rows: an order of rows to read them in; rows are independent of each other in every GGUF type, so
                reordering them before dequantisation is exact.
        """
        step = max(1, _CHUNK_BYTES // (4 * self.shape[-1]))
        for start in range(0, len(self.data), step):
            raw = self.data[start : start + step] if rows is None else self.data[rows[start : start + step]]
            yield raw if self.kind in _EXACT_AS_STORED else dequantize(raw, self.kind)

    def values(self) -> npt.NDArray[np.float32]:
        """The whole tensor as float32, in its shape."""
        return np.array(dequantize(self.data, self.kind), dtype=np.float32).reshape(self.shape)


class GGUFFile:
    """The header of a GGUF file, and its tensors as views of the mapped file.

    `metadata` maps keys to scalars, strings and short lists of numbers; long arrays and those of strings (the
    vocabulary) are read by `numbers` and `strings` when they are needed.

    Raises:
        ModelError: not a GGUF file, a version that is not read, or a damaged or truncated one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._arrays: dict[str, tuple[GGUFValueType, int, int]] = {}  # element type, count, offset of the first
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            status = path.stat()
            # an empty file cannot be mapped
            self._data: npt.NDArray[np.uint8] = (
                np.memmap(path, np.uint8, "r") if status.st_size else np.empty(0, np.uint8)
            )
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        if status.st_size < 24:
            raise ModelError(f"{path}: too short for a GGUF file ({status.st_size} bytes); get the file again")
        self._bytes = self._data.data
        if bytes(self._bytes[:4]) != _MAGIC:
            raise ModelError(f"{path}: not a GGUF file (it does not begin with the letters GGUF)")
        version = int.from_bytes(bytes(self._bytes[4:8]), "little")
        if version not in _VERSIONS:
            raise ModelError(
                f"{path}: GGUF version {version} is not read, only 2 and 3 (little-endian); convert it anew"
            )
        try:
            self._read_header()
        except (struct.error, ValueError, TypeError, OverflowError) as error:
            raise ModelError(f"{path}: the GGUF header is damaged or cut off ({error}); get the file again") from error

    @cached_property
    def identity(self) -> str:
        """What names the content, wherever the file lies: the SHA-256 of all its bytes (2 GB/s where the processor
        has instructions for it). Less than all would miss a fine-tuning that touched other tensors."""
        return hashlib.sha256(self._bytes).hexdigest()

    @property
    def architecture(self) -> str:
        """What `general.architecture` says, for example `gemma3`."""
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """The value of a metadata key; ModelError where the file has none."""
        if key not in self.metadata:
            raise ModelError(f"{self.path}: the GGUF metadata has no {key!r}, which this architecture needs")
        return self.metadata[key]

    def has_array(self, key: str) -> bool:
        """Whether the metadata has an array under this key."""
        return key in self._arrays

    def numbers(self, key: str) -> list[Any]:
        """An array of numbers in the metadata; ModelError where the file has none under this key."""
        element, count, at = self._array(key)
        if element not in _SCALARS:
            raise ModelError(f"{self.path}: {key} is an array of {element.name}, not of numbers; get the file again")
        return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self._bytes, at))

    def strings(self, key: str) -> list[str]:
        """An array of strings in the metadata; ModelError where the file has none under this key."""
        element, count, at = self._array(key)
        if element is not GGUFValueType.STRING:
            raise ModelError(f"{self.path}: {key} is an array of {element.name}, not of strings; get the file again")
        values = []
        try:
            for _ in range(count):
                value, at = self._string(at)
                values.append(value)
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {key} holds a string that is not UTF-8; get the file again") from error
        return values

    def _array(self, key: str) -> tuple[GGUFValueType, int, int]:
        if key not in self._arrays:
            raise ModelError(f"{self.path}: the GGUF metadata has no array {key!r}; use a complete GGUF file")
        return self._arrays[key]

    def _read_header(self) -> None:
        """Fill metadata and tensors."""
        tensor_count, value_count = struct.unpack_from("<QQ", self._bytes, 8)
        at = 24
        for _ in range(value_count):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            at = self._read_value(key, GGUFValueType(kind), at + 4)
        table = []
        for _ in range(tensor_count):
            name, at = self._string(at)
            (dimensions,) = struct.unpack_from("<I", self._bytes, at)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
            shape = struct.unpack_from(f"<{dimensions}Q", self._bytes, at + 4)
            kind, offset = struct.unpack_from("<IQ", self._bytes, at + 4 + 8 * dimensions)
            at += 16 + 8 * dimensions
            table.append((name, tuple(reversed(shape)), GGMLQuantizationType(kind), offset))
        alignment = int(self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-at // alignment) * alignment
        for name, shape, quantization, offset in table:
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} appears twice")
            self.tensors[name] = self._tensor(name, shape, quantization, start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> GGUFTensor:
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_values:
            raise ValueError(f"tensor {name!r} has shape {shape}, which {kind.name} cannot store")
        rows, row_bytes = prod(shape[:-1]), shape[-1] // block_values * block_bytes
        end = start + rows * row_bytes
        if end > len(self._bytes):
            raise ValueError(f"tensor {name!r} ends at byte {end:,} of a file of {len(self._bytes):,}")
        return GGUFTensor(name, shape, kind, self._data[start:end].reshape(rows, row_bytes))

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._bytes, at)
        end = at + 8 + length
        if end > len(self._bytes):
            raise ValueError(f"a string ends at byte {end:,} of a file of {len(self._bytes):,}")
        return bytes(self._bytes[at + 8 : end]).decode("utf-8"), end

    def _read_value(self, key: str, kind: GGUFValueType, at: int) -> int:
        """Keep one metadata value; the offset just past it."""
        if kind in _SCALARS:
            (self.metadata[key],) = struct.unpack_from("<" + _SCALARS[kind], self._bytes, at)
            return at + struct.calcsize(_SCALARS[kind])
        if kind is GGUFValueType.STRING:
            self.metadata[key], at = self._string(at)
            return at
        element, count = struct.unpack_from("<IQ", self._bytes, at)
        at += 12
        self._arrays[key] = (GGUFValueType(element), count, at)
        if (scalar := _SCALARS.get(element)) is not None:
            end = at + count * struct.calcsize(scalar)
            if end > len(self._bytes):
                raise ValueError(f"the array {key!r} ends at byte {end:,} of a file of {len(self._bytes):,}")
            if count <= 4096:  # per-layer settings
                self.metadata[key] = list(struct.unpack_from(f"<{count}{scalar}", self._bytes, at))
            return int(end)
        if element != GGUFValueType.STRING:
            raise ValueError(f"{key!r} is an array of type {element}")
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self._bytes, at)
            at += 8 + int(length)
        return at
