"""Shared helpers of the test suite."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_file(name: str) -> Path:
    """The path of a data file that lies beside the checkout; the test fails loudly where it is missing."""
    path = SHARED / name
    if not path.is_file():
        pytest.fail(f"{path} is missing: these tests read data that lies beside the checkout in shared/data")
    return path
