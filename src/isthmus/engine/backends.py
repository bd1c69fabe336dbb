"""What differs between devices when an engine is built: how the model is prepared, how large the arena may be, and
which executor runs the steps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import torch
from transformers import PreTrainedModel

from isthmus.engine import sizing
from isthmus.engine.config import CACHE_DTYPES, EngineConfig
from isthmus.engine.laps import Laps
from isthmus.engine.runner import Runner
from isthmus.engine.sampler import Sampler
from isthmus.engine.step import Executor
from isthmus.errors import ConfigError
from isthmus.memory import Pool
from isthmus.model.layout import ModelLayout
from isthmus.model.optimize import optimize

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """A model on its device."""

    described: str
    """How the model runs, for the log."""

    graph_bytes: int
    """What CUDA graphs take of the device, as measured before the first executor; 0 where there are none."""

    def arena_bytes(self) -> int:
        """Size of the arena; ConfigError if what was asked for is impossible. Called once, before `executor`."""
        ...

    def executor(self, pool: Pool, max_model_len: int) -> Executor:
        """Runs steps over an arena of the pool's size. The one made before must be gone."""
        ...


LEAST_CAPABILITY = (8, 0)
"""Ampere: bf16 products and copies to shared memory that run beside them."""

FP8_CAPABILITY = (8, 9)
"""Ada: the least that Triton converts e4m3 on."""


def resolve_device(config: EngineConfig) -> str:
    """ "cpu" or "cuda". ConfigError if a GPU is asked for that torch does not see or the kernels do not run on, or what
    does not run on the device. `auto` leaves a GPU alone that the kernels do not run on, and says so in the log."""
    wanted, obstacle = config.device.device, _obstacle()
    if wanted == "cuda" and obstacle is not None:
        raise ConfigError(f"--device cuda: {obstacle}: use --device cpu")
    if wanted == "auto" and obstacle is not None and torch.cuda.is_available():
        _log.warning("the GPU is not used: %s", obstacle)
    device = "cpu" if wanted == "cpu" or obstacle is not None else "cuda"
    kernels = {"cpu": "torch", "cuda": "triton"}[device]
    backend, cached = config.device.attention_backend, config.memory.kv_cache_dtype
    if backend not in ("auto", kernels):
        raise ConfigError(f"--attention-backend {backend} does not run on a {device}: use {kernels}")
    if device == "cuda" and CACHE_DTYPES[cached] == "float8_e4m3fn" and _capability() < FP8_CAPABILITY:
        raise ConfigError(f"--kv-cache-dtype {cached} needs compute capability 8.9 (Ada): use fp8_e5m2 or bfloat16")
    return device


def _obstacle() -> str | None:
    """Why the kernels cannot run on the GPU that torch uses; None: they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU here; a CPU build of torch never does"
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels are made for NVIDIA GPUs"
    if _capability() < LEAST_CAPABILITY:
        had = ".".join(map(str, _capability()))
        return f"{torch.cuda.get_device_name()} has compute capability {had}, and the kernels need 8.0 (Ampere)"
    return None


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


class CpuBackend:
    """Torch operators; weights repacked for the CPU."""

    graph_bytes = 0

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        config: EngineConfig,
        eos_token_ids: Collection[int],
        laps: Laps,
    ) -> None:
        self._model, self._layout, self._config, self._eos = model, layout, config, eos_token_ids
        self.described = str(optimize(model))
        laps.lap("weights repacked")

    def arena_bytes(self) -> int:
        """See `Backend`."""
        return sizing.arena_bytes(self._config.memory, self._layout.groups)

    def executor(self, pool: Pool, max_model_len: int) -> Executor:
        """See `Backend`."""
        sampler = Sampler(self._eos, self._layout.vocab_size)
        rows = self._config.scheduler.max_num_seqs
        poison = self._config.memory.check_memory == "full"
        return Runner(self._model, self._layout, pool.arena_bytes, pool.capacities, rows, sampler, poison=poison)


def backend_on(
    device: str,
    model: PreTrainedModel,
    layout: ModelLayout,
    config: EngineConfig,
    eos_token_ids: Collection[int],
    laps: Laps,
) -> Backend:
    """The backend of a device ("cpu" or "cuda") that the model is on; notes in `laps` what took how long."""
    if device == "cpu":
        return CpuBackend(model, layout, config, eos_token_ids, laps)
    from isthmus.engine.gpu_backend import GpuBackend  # noqa: PLC0415 (needs Triton, which a CPU install may not have)

    return GpuBackend(model, layout, config, eos_token_ids, laps)
