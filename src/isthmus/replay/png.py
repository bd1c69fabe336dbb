"""A PNG file from an array of pixels: the parts of the format that takes (W3C PNG, third edition), and no more."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 2
_EIGHT_BITS = 8


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """The file of `[height, width, 3]` pixels."""
    height, width, channels = pixels.shape
    assert channels == 3
    head = struct.pack(">IIBBBBB", width, height, _EIGHT_BITS, _RGB, 0, 0, 0)
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a row: no filter
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    return _SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
