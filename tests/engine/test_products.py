"""Torch keeps few prepared products, also when it was imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from isthmus.engine.products import BOUNDS, bound_product_caches

SHAPES = int(BOUNDS["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) + 40
PRODUCTS = f"""
import torch
from isthmus.engine.products import bound_product_caches
bound_product_caches()
weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8), 1)
for _ in range(2):
    for rows in range(1, {SHAPES} + 1):
        torch.ops.mkldnn._linear_pointwise(torch.zeros(rows, 8), weight, None, "none", [], "")
"""


def prepared(**environment: str) -> int:
    """How many products oneDNN prepared for two rounds of `SHAPES` shapes."""
    env = {name: value for name, value in os.environ.items() if name not in BOUNDS}
    env |= {"ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=env, capture_output=True, text=True, check=True)
    return sum("create:cache_miss" in line and "inner_product" in line for line in done.stdout.splitlines())


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="this torch has no oneDNN")
def test_the_oldest_products_are_forgotten_unless_the_user_says_otherwise() -> None:
    assert prepared() == 2 * SHAPES
    assert prepared(ONEDNN_PRIMITIVE_CACHE_CAPACITY="4096") == SHAPES


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "77")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # so that what it was comes back afterwards
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    bound_product_caches()
    assert {name: os.environ[name] for name in BOUNDS} == BOUNDS | {"LRU_CACHE_CAPACITY": "77"}
