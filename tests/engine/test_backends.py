"""Which device an engine takes, and what is said about one that it cannot take."""

from __future__ import annotations

import logging

import pytest
import torch

from isthmus.engine.backends import resolve_device
from isthmus.engine.config import EngineConfig
from isthmus.errors import ConfigError


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, hip: str | None = None) -> None:
    """Let torch see a GPU of this compute capability; None: no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", hip)


def device(**settings: str) -> str:
    return resolve_device(EngineConfig.build(model="m", **settings))


def test_auto_takes_a_gpu_that_the_kernels_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (8, 0))
    assert (device(), device(device="cuda"), device(device="cpu")) == ("cuda", "cuda", "cpu")
    gpu(monkeypatch, None)
    assert device() == "cpu"


@pytest.mark.parametrize(("capability", "hip", "named"), [((7, 5), None, "7.5"), ((9, 4), "6.2", "ROCm")])
def test_auto_leaves_another_gpu_alone_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    hip: str | None,
    named: str,
) -> None:
    gpu(monkeypatch, capability, hip)
    with caplog.at_level(logging.WARNING):
        assert device() == "cpu"
    assert named in caplog.text
    with pytest.raises(ConfigError, match=f"--device cuda: .*{named}.*--device cpu"):
        device(device="cuda")


def test_no_gpu_and_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None)
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA GPU"):
        device(device="cuda")
    with pytest.raises(ConfigError, match="triton does not run on a cpu: use torch"):
        device(attention_backend="triton")
    gpu(monkeypatch, (9, 0))
    with pytest.raises(ConfigError, match="torch does not run on a cuda: use triton"):
        device(attention_backend="torch")


def test_a_cache_type_that_the_gpu_cannot_convert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the GPU for its sake: that would be a machine a hundred times slower."""
    gpu(monkeypatch, (8, 0))
    assert device(kv_cache_dtype="fp8_e5m2") == device(kv_cache_dtype="bfloat16") == "cuda"
    for name in ("fp8", "fp8_e4m3"):
        with pytest.raises(ConfigError, match=r"--kv-cache-dtype .* 8\.9"):
            device(kv_cache_dtype=name)
    gpu(monkeypatch, (8, 9))
    assert device(kv_cache_dtype="fp8") == "cuda"
