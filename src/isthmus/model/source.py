"""Finding a model and loading it: a name becomes a directory that Transformers reads, and that becomes a model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from isthmus.errors import ModelError
from isthmus.model.convert import convert_gguf, rounded_folder
from isthmus.model.demo import demo_chat_folder, demo_folder

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEXT_PREFIX = {r"^(model\.)?language_model\.(model\.)?": "model.", r"^model\.lm_head\.": "lm_head."}
"""How the text model's weights are named inside a multimodal checkpoint, and how it names them itself."""

_SEED = 0
_RESTORED = ("mxfp4", "fp8")
"""Quantizations that Transformers undoes while it loads, by its own name for them."""

_UNMAKEABLE = (
    *(OSError, ImportError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    SafetensorError,
)


@dataclass(frozen=True)
class ModelSource:
    """A model on disk: config.json, safetensors and tokenizer files in one directory."""

    name: str  # what the user called it; the default served name
    directory: Path
    converted: bool = False  # the directory is ours, in the cache: copies in other dtypes may be kept inside it

    def load_config(self) -> PretrainedConfig:
        """The config of the text model (of a multimodal config: its text part).

        Raises:
            ModelError: a damaged or missing config.json, a `model_type` Transformers does not know, a model that does
                not generate text, or weights that are quantized in a way that is not undone.
        """
        model_type = _read_json(self.directory / "config.json").get("model_type")
        installed = f"Transformers {transformers.__version__}"
        if model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"{self.directory / 'config.json'}: model_type {model_type!r} is not known to {installed}; "
                "upgrade it with pip install -U transformers, or choose another model"
            )
        with _quiet(bar=False):
            try:
                config = AutoConfig.from_pretrained(self.directory)
            except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
                raise ModelError(f"{self.directory / 'config.json'}: {installed} refuses it: {_line(error)}") from error
        text = config.get_text_config(decoder=True)
        if text is not config:
            text.tie_word_embeddings = config.tie_word_embeddings  # the outer config decides this for both
        if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{self.directory / 'config.json'}: {model_type!r} is not a model that generates text")
        _restore(text, _quantized(config) or _quantized(text), self.directory / "config.json")
        return text

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template if the model has one.

        Raises:
            ModelError: the tokenizer's files are missing or damaged.
        """
        with _quiet(bar=False):
            try:
                return (
                    _converted_tokenizer(self.directory)
                    if self.converted
                    else AutoTokenizer.from_pretrained(self.directory)
                )
            except Exception as error:  # tokenizers raises bare Exception for a damaged file
                raise ModelError(f"{self.directory}: the tokenizer cannot be loaded: {_line(error)}") from error

    def end_token_ids(self) -> tuple[int, ...]:
        """The ids after which a text is complete, from generation_config.json, else config.json; may be empty.

        Raises:
            ModelError: a damaged file.
        """
        ids = None
        if (self.directory / "generation_config.json").is_file():
            ids = _read_json(self.directory / "generation_config.json").get("eos_token_id")
        if ids is None:
            ids = self.load_config().eos_token_id
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor by its name in the checkpoint, one at a time, mapped from its file."""
        for path in _shards(self.directory):
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    yield name, shard.get_tensor(name)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all stored tensors, in the dtypes they are stored in."""
        return sum(_check_shard(path) for path in _shards(self.directory))


def resolve(model: str, *, progress: bool | None = None, load_format: str = "auto") -> ModelSource:
    """Find a model and check that it can be read, before anything large happens.

    Args:
        model: `demo`, `demo-chat`, a `.gguf` file, a directory with config.json and safetensors, or a hub id.
        progress: show bars on stderr; None: only on a terminal.
        load_format: `dummy` needs no weights to be there.

    Raises:
        ModelError: not found, not installed, not reachable, damaged, or of an architecture that is not known.
    """
    source = _locate(model, progress, load_format)
    source.load_config()
    if load_format != "dummy":
        _check_weights(source, source.directory)
    return source


def build_model(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    attn_implementation: str = "isthmus",
    load_format: str = "auto",
    progress: bool | None = None,
    device: str = "cpu",
) -> PreTrainedModel:
    """The text model in `dtype`, for inference.

    Weights whose stored dtype is `dtype` are mapped from their file; others are converted tensor by tensor.

    Args:
        attn_implementation: the name of a registered Transformers attention function.
        load_format: `auto` reads the weights; `dummy` makes random ones by the library's own initialisation, the
            same ones every time on the same device.
        device: where the weights go, "cpu" or "cuda".

    Raises:
        ModelError: weights are missing, unknown, or of another shape, naming the first few; or the family's attention
            cannot be replaced.
    """
    config = source.load_config()
    if load_format == "dummy":
        path = source.directory / "config.json"
        with _building(path, config, attn_implementation), torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(_SEED)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    else:
        folder = rounded_folder(source.directory, dtype, progress=progress) if source.converted else source.directory
        _check_weights(source, folder)
        if _quantized(config):
            _check_blocks(folder)
        model = _load(folder, config, dtype, attn_implementation, progress)
    return model.to(device).eval().requires_grad_(False)


def _quantized(config: PretrainedConfig) -> dict[str, Any]:
    """How the weights are quantized; empty: they are not."""
    return getattr(config, "quantization_config", None) or {}


def _restore(config: PretrainedConfig, quantized: dict[str, Any], path: Path) -> None:
    """Let quantized weights be loaded as plain ones. ModelError if Transformers cannot do that for them."""
    if not quantized:
        return
    method = quantized.get("quant_method")
    if method not in _RESTORED:
        raise ModelError(
            f"{path}: the weights are quantized by {method!r}; served are {' and '.join(_RESTORED)}, whose weights "
            "become plain ones, .gguf files, and checkpoints without quantization: choose one of them"
        )
    config.quantization_config = {**quantized, "dequantize": True}


def _check_blocks(folder: Path) -> None:
    """ModelError for fp8 weights whose last block is smaller than the others: Transformers takes all for alike."""
    shapes: dict[str, list[int]] = {}
    for path in _shards(folder):
        with safe_open(path, framework="pt") as shard:
            shapes |= {name: shard.get_slice(name).get_shape() for name in shard.keys()}  # noqa: SIM118 (not a mapping)
    for name, grid in shapes.items():
        weight = name.removesuffix("_scale_inv")
        if weight == name or len(grid) < 2:  # no scale, or one of the whole weight
            continue
        for size, blocks in zip(shapes.get(weight, grid)[-2:], grid[-2:], strict=True):
            if blocks > 1 and (size % blocks or (size // blocks).bit_count() != 1):
                raise ModelError(
                    f"{folder}: {weight} has {size:,} numbers in {blocks:,} blocks of fp8, the last smaller, which "
                    "Transformers does not undo: take the checkpoint without quantization"
                )


@contextmanager
def _building(path: Path, config: PretrainedConfig, attn_implementation: str) -> Iterator[None]:
    """What the constructors of modules raise over numbers that do not go together, and over weights, as ModelError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _UNMAKEABLE as error:
        if error.args == (attn_implementation,):  # some families look in a table of their own, not in the registry
            raise ModelError(f"{config.model_type} cannot be served: its attention cannot be replaced") from error
        raise ModelError(f"{path}: Transformers cannot make a {config.model_type} of it: {_line(error)}") from error


def _load(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str, progress: bool | None
) -> PreTrainedModel:
    multimodal = _read_json(folder / "config.json")["model_type"] != config.model_type
    with (
        _quiet(bar=sys.stderr.isatty() if progress is None else progress),
        _building(folder, config, attn_implementation),
    ):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report names them all
            key_mapping=_TEXT_PREFIX if multimodal else None,
        )
    unexpected = set(report["unexpected_keys"])
    if multimodal:  # the vision and audio towers are not loaded
        unexpected = {name for name in unexpected if name.startswith(("language_model.", "model.language_model."))}
    mismatched = {item[0] for item in report["mismatched_keys"]}
    for what, names in (("missing", report["missing_keys"]), ("unknown", unexpected), ("of another shape", mismatched)):
        if names:
            first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise ModelError(
                f"{folder}: {len(names)} weights are {what}: {first}; config.json and weights do not match"
            )
    return model


def _converted_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """What AutoTokenizer gives for a folder of ours, in half the time: it parses tokenizer.json three times more."""
    config = _read_json(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")),
        chat_template=template.read_text() if template.is_file() else None,
        **{name: token for name, token in config.items() if name.endswith("_token")},
    )


def _locate(model: str, progress: bool | None, load_format: str) -> ModelSource:
    if model == "demo":
        return ModelSource("demo", demo_folder(progress=progress), converted=True)
    if model == "demo-chat":
        return ModelSource("demo-chat", demo_chat_folder(progress=progress), converted=True)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path}: the directory has no config.json; give a Transformers model directory or a .gguf file"
            )
        return ModelSource(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: not a .gguf file; give its directory, a .gguf file, a hub id, or `demo`")
        return ModelSource(path.stem, convert_gguf(path, progress=progress), converted=True)
    if path.suffix == ".gguf" or model.startswith(".") or not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model}: no such file or directory; give a directory, a .gguf file, a hub id, or `demo`")
    return ModelSource(model, _download(model, load_format))


def _download(model: str, load_format: str) -> Path:
    patterns = [name for name in _HUB_FILES if load_format != "dummy" or name != "*.safetensors"]
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # network libraries below it, and their errors, change with the hub's version
        raise ModelError(
            f"{model}: not a local file or directory, and the model hub did not give it ({_line(error)}); "
            "check the name and the network, or use `demo`"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"{model}: the hub repository has no config.json; give a model in Transformers format")
    return folder


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a model, in order.

    Raises:
        ModelError: there are none, or the index names one that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise ModelError(
            f"{folder}: has no model.safetensors and no index of shards; only safetensors weights are read"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map")
    shards = [folder / str(name) for name in sorted(set(weight_map.values()))]
    for path in shards:
        if not path.is_file():
            raise ModelError(f"{path}: missing, though {index.name} names it")
    return shards


def _check_weights(source: ModelSource, folder: Path) -> None:
    try:
        for path in _shards(folder):
            _check_shard(path)
    except ModelError as error:
        remedy = f"delete {folder} to convert it anew" if source.converted else "get the file again"
        raise ModelError(f"{error}; {remedy}") from error
    except OSError as error:
        raise ModelError(f"{folder}: the weights cannot be read ({_line(error)})") from error


def _check_shard(path: Path) -> int:
    """The bytes of the tensors in a safetensors file; ModelError where the file is not as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{path}: damaged or cut off (its header ends past the end of the file)")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ModelError(f"{path}: the safetensors header is damaged ({error})") from error
    if 8 + length + end != size:
        raise ModelError(f"{path}: damaged or cut off ({size:,} bytes, its header says {8 + length + end:,})")
    return int(end)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({_line(error)})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, not a JSON object")
    return content


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


@contextmanager
def _quiet(*, bar: bool) -> Iterator[None]:
    """Transformers without its warnings and, unless wanted, its progress bars; what they say is in our errors."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not bar:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
