"""Keeps libraries out of Transformers' models, which are what ours are compared with.

Where fla-core is installed, Transformers computes gated delta nets with it, and so neither on a CPU nor in fp32.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

from transformers.integrations import hub_kernels

LIBRARIES = ("fla", "causal_conv1d", "mamba_ssm")


def _import_module(name: str, package: str | None = None) -> ModuleType:
    if name.partition(".")[0] in LIBRARIES:
        raise ModuleNotFoundError(f"{name} is kept out of Transformers' models", name=name)
    return importlib.import_module(name, package)


hub_kernels.importlib = SimpleNamespace(import_module=_import_module)
