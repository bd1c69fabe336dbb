"""A model's shape: its layer groups and the bytes of its weights, from modules on the meta device; none is read."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from isthmus import presets
from isthmus.engine.config import CACHE_DTYPES, EngineConfig
from isthmus.errors import ModelError
from isthmus.model.layout import ModelLayout, derive
from isthmus.model.source import ModelSource, build_model, resolve
from isthmus.plan.ranks import per_rank


@dataclass(frozen=True)
class Shape:
    """What planning needs to know of a model."""

    name: str
    source: str  # where its numbers are from
    layout: ModelLayout  # of one rank
    ranks: int
    weight_bytes: int  # of the whole model: every parameter, tied ones once, in `dtype`
    dtype: str
    cache_dtype: str
    stored: str  # how the published weights differ from that; empty if they do not


@dataclass(frozen=True)
class Built:
    """A model on the meta device: modules, and tensors without memory."""

    model: PreTrainedModel
    name: str
    source: str
    dtype: torch.dtype
    stored: str  # as in a `Shape`


def build(config: EngineConfig) -> Built:
    """`config.model.model` on the meta device: a preset, a config.json, or whatever `serve` takes.

    ModelError for a model that is not found, or not known to Transformers.
    """
    with _found(config.model.model) as (source, described, stored), _without_warnings():
        dtype = _dtype(config.model.dtype, source.load_config().dtype)
        model = build_model(source, dtype, load_format="dummy", device="meta")
    return Built(model, source.name, described, dtype, stored)


def load(config: EngineConfig, ranks: int = 1) -> Shape:
    """The shape of what `build` takes.

    ModelError for a model that cannot be had or served, naming the layer; ConfigError if its heads cannot be split
    over so many ranks.
    """
    built = build(config)
    dtype = str(built.dtype).removeprefix("torch.")
    cache_dtype = CACHE_DTYPES[config.memory.kv_cache_dtype] or dtype
    with _without_warnings():
        layout = derive(built.model, config.memory.page_size, cache_dtype)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in built.model.parameters())
    return Shape(built.name, built.source, per_rank(layout, ranks), ranks, weights, dtype, cache_dtype, built.stored)


@contextlib.contextmanager
def _found(model: str) -> Iterator[tuple[ModelSource, str, str]]:
    """The model's directory, where its numbers are from, and how its published weights differ."""
    preset, path = presets.find(model), Path(model).expanduser()
    with tempfile.TemporaryDirectory(prefix="isthmus-plan-") as folder:
        if preset is not None:
            name, shape = preset
            yield ModelSource(name, shape.write(Path(folder))), shape.source, shape.stored
        elif path.suffix == ".json":
            if not path.is_file():
                raise ModelError(
                    f"{path}: no such file; give a config.json, a model as for serve, or one of {_names()}"
                )
            shutil.copyfile(path, Path(folder) / "config.json")
            yield ModelSource(str(path), Path(folder)), str(path), ""
        else:
            try:
                found = resolve(model, load_format="dummy")
            except ModelError as error:
                raise ModelError(f"{error}; or plan one of {_names()}") from error
            yield found, str(found.directory / "config.json"), ""


def _names() -> str:
    return ", ".join(presets.PRESETS)


def _dtype(asked: str, stored: Any) -> torch.dtype:
    """As the engine chooses it: what was asked for, what the checkpoint says, or bfloat16."""
    found = getattr(torch, asked) if asked != "auto" else stored if isinstance(stored, torch.dtype) else torch.bfloat16
    assert isinstance(found, torch.dtype)
    return found


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Transformers without its advice on kernels that nothing here runs."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
