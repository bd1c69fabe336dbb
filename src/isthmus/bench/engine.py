"""What benches of a model's steps share: its engine, what a forward costs, and how times are told."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from isthmus.bench.bandwidth import copy_bandwidth
from isthmus.engine.backends import resolve_device
from isthmus.engine.config import EngineConfig, SchedulerConfig
from isthmus.flags import engine_args
from isthmus.llm import LLM
from isthmus.model.cost import ForwardCost, count
from isthmus.model.source import build_model, resolve

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}


def started(args: argparse.Namespace, sequences: int) -> tuple[LLM, dict[str, Any], float]:
    """An engine for so many sequences at least, by its flags; its settings; and the bytes a second of a copy, measured
    before it took the memory."""
    settings = {"max_num_seqs": max(SchedulerConfig.max_num_seqs, sequences)} | engine_args(args)
    device = resolve_device(EngineConfig.build(**settings))
    bandwidth = copy_bandwidth(torch.device(device), _COPY_BYTES[device])
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine takes what it finds free
    llm = LLM(**settings)
    return llm, {name: str(value) for name, value in (settings | {"model": llm.name}).items()}, bandwidth


def forward_cost(llm: LLM) -> ForwardCost:
    """Of its model."""
    source = resolve(llm.config.model.model, load_format=llm.config.model.load_format)
    return count(build_model(source, llm.dtype, load_format="dummy", device="meta"), llm.layout)


def facts(llm: LLM, settings: dict[str, Any], bandwidth: float, cost: ForwardCost) -> dict[str, Any]:
    """What was measured, and what it is compared with."""
    return {
        "model": llm.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": llm.config.device.device,
        "settings": settings,
        "copy_bytes_per_second": round(bandwidth),
        "weight_bytes": cost.dense_bytes + cost.expert_bytes,
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    """The median, and every sample."""
    samples = [round(s * 1e3, 4) for s in seconds]
    return {"median": round(statistics.median(samples), 4), "samples": samples}
