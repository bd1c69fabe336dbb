"""Turning a GGUF file, once, into a folder that Transformers loads: config, safetensors, tokenizer.

Weights are kept exactly: quantised tensors as the float32 they stand for, half types as they are. The folder appears
under its final name only when it is whole; an interrupted conversion leaves a `.partial` folder that the next one
removes. A lock makes a second process wait for the first instead of converting too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from isthmus.errors import ModelError
from isthmus.model.gguf import GGUFFile, GGUFTensor
from isthmus.model.gguf_family import ROPE_FACTORS, GGUFFamily, config_values, end_token_ids, family_of
from isthmus.model.gguf_tokenizer import write_tokenizer

_LAYOUT = "2"
"""Part of every folder's key: raise it when a conversion would come out differently."""

_HALF_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}


def cache_root() -> Path:
    """Where converted models are kept: `$ISTHMUS_CACHE`, else `~/.cache/isthmus`."""
    return Path(os.environ.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus")


def folder_of(name: str, identity: str) -> Path:
    """The folder of a converted model: its name, and a key of what it was converted from and how."""
    key = hashlib.sha256(f"{_LAYOUT} {identity}".encode()).hexdigest()[:16]
    return cache_root() / f"{name}-{key}"


def convert_gguf(path: Path, *, progress: bool | None = None) -> Path:
    """The folder with the converted model of a GGUF file; converts it where that has not been done.

    Args:
        progress: show a bar on stderr; None: only on a terminal.

    Raises:
        ModelError: the file is damaged or truncated, or its architecture or a tensor's type is not read.
    """
    file = GGUFFile(path)
    folder = folder_of(path.stem, file.identity)
    return build_folder(folder, lambda partial: write_model(file, partial, progress=progress))


def build_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, filled by `write(partial)` unless it exists; never seen half-filled, filled by one process at a time.

    Raises:
        ModelError: the cache folder cannot be written.
    """
    if folder.is_dir():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if folder.is_dir():
                return folder
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                write(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{folder.parent}: cannot keep the converted model there ({error.strerror or error}); "
            "free space or set ISTHMUS_CACHE to another folder"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_model(file: GGUFFile, folder: Path, *, progress: bool | None) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`."""
    family = family_of(file)
    config, weights = _understand(file, family)
    config.save_pretrained(folder)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end_token_ids(file) or None,
        "pad_token_id": config.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(file, folder)
    write_safetensors(folder / "model.safetensors", weights, f"converting {file.path.name}", progress)


def _understand(file: GGUFFile, family: GGUFFamily) -> tuple[PretrainedConfig, dict[str, _Weight]]:
    """The config that the metadata describes, and the weights of its model."""
    try:
        config = AutoConfig.for_model(family.model_type, **config_values(file))
        return config, _weights(file, family, config)
    except (ValueError, TypeError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(f"{file.path}: its metadata does not describe a {family.model_type} ({reason})") from error


class StoredTensor(Protocol):
    """A tensor that can be written to a safetensors file piece by piece."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def chunks(self) -> Iterator[npt.NDArray[Any]]: ...


@dataclass(frozen=True)
class _Weight:
    """One GGUF tensor to write, and what undoes its storage."""

    tensor: GGUFTensor
    rows: npt.NDArray[np.intp] | None  # the order to read its rows in
    offset: float  # subtracted from its values

    @property
    def dtype(self) -> str:
        return "F32" if self.offset else self.tensor.safetensors_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (4 if self.dtype == "F32" else 2)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        if self.offset:
            yield self.tensor.values() - np.float32(self.offset)
        else:
            yield from self.tensor.chunks(self.rows)


@dataclass(frozen=True)
class _Rounded:
    """One tensor of a safetensors file, rounded to a half type when it is read."""

    name: str
    shape: tuple[int, ...]
    target: torch.dtype
    shard: Any  # an open safetensors file

    @property
    def dtype(self) -> str:
        return _HALF_TYPES[self.target]

    @property
    def nbytes(self) -> int:
        return 2 * prod(self.shape)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        tensor: torch.Tensor = self.shard.get_tensor(self.name)
        yield tensor.to(self.target).view(torch.int16).numpy()


def rounded_folder(folder: Path, dtype: torch.dtype, *, progress: bool | None = None) -> Path:
    """A converted model's weights in `dtype`: `folder` itself, or a copy of half its size made once inside it.

    Loading from the copy maps half the bytes and converts nothing; its values are those that loading the exact
    weights in `dtype` gives.

    Raises:
        ModelError: the cache folder cannot be written.
    """
    if dtype not in _HALF_TYPES:
        return folder

    def write(partial: Path) -> None:
        shutil.copy(folder / "config.json", partial)
        with safe_open(folder / "model.safetensors", framework="pt") as shard:
            tensors = {
                name: _Rounded(name, tuple(shard.get_slice(name).get_shape()), dtype, shard)
                for name in shard.keys()  # noqa: SIM118 (not a mapping)
            }
            write_safetensors(partial / "model.safetensors", tensors, f"rounding to {_HALF_TYPES[dtype]}", progress)

    return build_folder(folder / _HALF_TYPES[dtype].lower(), write)


def _weights(file: GGUFFile, family: GGUFFamily, config: PretrainedConfig) -> dict[str, _Weight]:
    """Every parameter of the Transformers model, by its name there.

    Raises:
        ModelError: parameters without a tensor, tensors without a parameter, or another shape.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    weights, missing, unused = {}, [], set(file.tensors) - {ROPE_FACTORS}
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = file.tensors.get(stored)
        if tensor is None:
            missing.append(name)
            continue
        if tensor.shape != tuple(parameter.shape):
            raise ModelError(
                f"{file.path}: {stored} has shape {list(tensor.shape)}, {name} needs {list(parameter.shape)}"
            )
        if not tensor.readable:
            raise ModelError(f"{file.path}: {stored} is of type {tensor.kind.name}, which gguf-py cannot dequantise")
        unused.discard(stored)
        offset = 1.0 if family.norm_offset and name.endswith("norm.weight") else 0.0
        weights[name] = _Weight(tensor, _rotary_rows(name, family, config), offset)
    if missing or unused:
        raise ModelError(
            f"{file.path}: its tensors are not those of {family.model_class}: {len(missing)} missing "
            f"({_first(missing)}), {len(unused)} unknown ({_first(sorted(unused))}); use the model's safetensors"
        )
    return weights


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "none"


def _rotary_rows(name: str, family: GGUFFamily, config: PretrainedConfig) -> npt.NDArray[np.intp] | None:
    """The order of rows that puts each head's rotary pairs back into two halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not family.interleaved_rotary:
        return None
    stored = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
    return stored.transpose(0, 2, 1).reshape(-1)


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor], title: str, progress: bool | None) -> None:
    """Stream tensors into one safetensors file, so that memory holds a chunk and not the model."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned, so that it can be mapped as it is
    disable = None if progress is None else not progress
    with path.open("wb") as out, tqdm(total=end, unit="B", unit_scale=True, desc=title, disable=disable) as bar:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors.values():
            for chunk in tensor.chunks():
                out.write(np.ascontiguousarray(chunk).data)
                bar.update(chunk.nbytes)
