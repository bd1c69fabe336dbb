"""Benches of models convert none into the user's cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_cache(own_cache: None) -> None:
    pass
