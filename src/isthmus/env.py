"""What an issue report needs to know about a machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("isthmus", "torch", "transformers", "triton", "tokenizers", "safetensors", "gguf", "numpy")


def describe() -> dict[str, Any]:
    """Versions, processor, memory and commit. Values that this machine cannot tell are None."""
    import torch  # noqa: PLC0415

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _cpuinfo("model name") or platform.processor() or None,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def run(as_json: bool) -> int:
    """Print it."""
    found = describe()
    if as_json:
        print(json.dumps(found))
        return 0
    for name, value in (found | found.pop("packages")).items():
        print(f"{name:<16}{'-' if value is None else value}")
    return 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo(key: str) -> str | None:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    return next(
        (line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith(key)), None
    )


def _commit() -> str | None:
    """The checkout's commit, when the package runs from one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
