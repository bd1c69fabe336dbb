"""What differs between devices when an engine is built: how the model is prepared, how large the arena may be, and
which executor runs the steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from transformers import PreTrainedModel

from isthmus.engine import sizing
from isthmus.engine.config import DeviceConfig, EngineConfig
from isthmus.engine.laps import Laps
from isthmus.engine.runner import Runner
from isthmus.engine.sampler import Sampler
from isthmus.engine.step import Executor
from isthmus.errors import ConfigError
from isthmus.memory import Pool
from isthmus.model.layout import ModelLayout
from isthmus.model.optimize import optimize


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


def resolve_device(config: DeviceConfig) -> str:
    """ "cpu" or "cuda". ConfigError if a GPU is asked for that torch does not see, or kernels that do not run there."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError(
            "--device cuda: torch sees no CUDA GPU here: use --device cpu, or install a CUDA build of torch"
        )
    device = config.device if config.device != "auto" else "cuda" if there else "cpu"
    kernels = {"cpu": "torch", "cuda": "triton"}[device]
    if config.attention_backend not in ("auto", kernels):
        raise ConfigError(f"--attention-backend {config.attention_backend} does not run on a {device}: use {kernels}")
    return device


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
