"""Settings of the engine: frozen dataclasses, one per layer, each seeing only its own fields.

Every field carries a `Setting` in its metadata, so flags, YAML keys and the table in the docs are generated
from here and cannot drift apart. Nothing in this file imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.errors import ConfigError

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_MOST = 1 << 60

DTYPES = ("auto", "bfloat16", "float16", "float32")
CACHE_DTYPES = {
    "auto": None,  # that of the model
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""`--kv-cache-dtype` and the names that pages know."""


def parse_size(text: str | int) -> int:
    """`"4g"`, `"1.5m"`, `"32k"` or a plain number as an integer; k, m and g are powers of 1024.

    ConfigError (a ValueError, so argparse reports it too) when the text is not a size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write a number, or one with k, m or g (1024-based) such as 4g")
    size = float(match[1]) * _UNITS[match[2]]
    if size >= _MOST:
        raise ConfigError(f"{text!r:.40} is larger than any memory: write a size below {_MOST >> 30}g")
    if size != int(size):
        raise ConfigError(f"{text!r} is not a whole number")
    return int(size)


def parse_fractions(text: str | Mapping[str, float]) -> Mapping[str, float]:
    """`"full=0.5,window=0.5"` as a mapping of group name to share. ConfigError when it does not parse."""
    if not isinstance(text, str):
        return text
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): float(share) for name, share in pairs}
    except ValueError:
        raise ConfigError(f"{text!r} is not a split: write shares by group such as full=0.5,window=0.5") from None


@dataclass(frozen=True)
class Setting:
    """How a field appears outside: its flag, what `--help` says, and the other engines' names for it."""

    help: str
    flag: str  # "--max-model-len"; a bare name is a positional
    aliases: tuple[str, ...] = ()  # accepted, not shown
    choices: tuple[str, ...] = ()
    bare: str | None = None  # what the flag alone means; None: a value is due
    shorthands: tuple[tuple[str, str], ...] = ()  # flags without a value and the choice they mean; accepted, not shown
    parse: Callable[[str], Any] | None = None  # from the command line or YAML text; None: the field's own type


def setting(flag: str, help: str, *, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A dataclass field that carries a `Setting`."""
    metadata = {"setting": Setting(help, flag, **more)}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def setting_of(spec: dataclasses.Field[Any]) -> Setting:
    """The `Setting` a field carries. AssertionError for a field that has none: every field must."""
    found = spec.metadata.get("setting")
    assert isinstance(found, Setting), f"{spec.name} carries no setting"
    return found


def settings(config: type) -> Iterator[tuple[str, Setting, Any]]:
    """`(field name, setting, default)` of one config class, in order. The default is MISSING where there is none."""
    for spec in dataclasses.fields(config):
        yield spec.name, setting_of(spec), spec.default


class Checked:
    """Mixin of config classes: `ConfigError` naming the flag of the field that is wrong."""

    def _require(self, name: str, ok: bool, want: str) -> None:
        if ok:
            return
        spec = next(spec for spec in dataclasses.fields(self) if spec.name == name)  # type: ignore[arg-type]
        raise ConfigError(f"{setting_of(spec).flag} must be {want}, not {getattr(self, name)!r}")

    def _require_choices(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            choices = setting_of(spec).choices
            if choices:
                self._require(spec.name, getattr(self, spec.name) in choices, f"one of {', '.join(choices)}")


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Which model, and how its weights are held."""

    model: str = setting("model", "hub id, directory, .gguf file, or demo", aliases=("--model", "--model-path"))
    dtype: str = setting(
        "--dtype", "type of weights and activations; auto is what the checkpoint says", default="auto", choices=DTYPES
    )
    load_format: str = setting(
        "--load-format",
        "auto reads the weights, dummy draws random ones",
        default="auto",
        choices=("auto", "dummy"),
    )
    max_model_len: int | None = setting(
        "--max-model-len",
        "longest prompt and output together; default: the model's context, or what fits the pool",
        default=None,
        aliases=("--context-length",),
        parse=parse_size,
    )

    def __post_init__(self) -> None:
        self._require_choices()
        self._require("model", bool(self.model), "a hub id, a directory, a .gguf file, or demo")
        self._require("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2 tokens")


@dataclass(frozen=True)
class MemoryConfig(Checked):
    """How large the arena is and how it is shared."""

    memory: str = setting(
        "--memory",
        "unified: all kinds share the arena; static: fixed walls between them",
        default="unified",
        choices=("unified", "static"),
        shorthands=(("--enable-unified-memory", "unified"),),
    )
    pool_bytes: int | None = setting(
        "--pool-bytes",
        "size of the arena; default: a share of the memory that is free",
        default=None,
        aliases=("--kv-cache-memory-bytes",),
        parse=parse_size,
    )
    gpu_memory_utilization: float = setting(
        "--gpu-memory-utilization",
        "share of the device's memory to use, weights included",
        default=0.9,
        aliases=("--mem-fraction-static",),
    )
    max_total_tokens: int | None = setting(
        "--max-total-tokens", "cap on the tokens that all sequences cache together", default=None, parse=parse_size
    )
    enable_prefix_caching: bool = setting(
        "--no-enable-prefix-caching",
        "compute every prompt anew",
        default=True,
        aliases=("--disable-radix-cache",),
    )
    kv_cache_dtype: str = setting(
        "--kv-cache-dtype",
        "type of cached keys and values; auto is that of the model",
        default="auto",
        choices=tuple(CACHE_DTYPES),
    )
    page_size: int = setting("--page-size", "tokens per page", default=16)
    check_memory: str = setting(
        "--check-memory",
        "find, name and fence faults of memory: audit (the flag alone) is cheap, full checks every page a step touches",
        default="off",
        choices=("off", "audit", "full"),
        bare="audit",
    )
    static_split: Mapping[str, float] | None = setting(
        "--static-split",
        "shares of the groups with --memory static, such as full=0.5,window=0.5; default: best for --static-workload",
        default=None,
        parse=parse_fractions,
    )
    static_workload: tuple[int, int] = setting(
        "--static-workload",
        "prompt,output lengths the default static split is best for",
        default=(1024, 256),
        parse=lambda text: tuple(parse_size(part) for part in text.split(",")),
    )
    journal: str | None = setting(
        "--journal", "file that records what the pool does, for isthmus replay; default: none", default=None
    )
    journal_bytes: int | None = setting(
        "--journal-bytes",
        "what the journal keeps: the newest so many bytes of it; default: 64m, or more for a very large pool",
        default=None,
        parse=parse_size,
    )

    def __post_init__(self) -> None:
        self._require_choices()
        self._require("journal", self.journal != "", "a file")
        self._require("journal_bytes", self.journal_bytes is None or self.journal_bytes >= 1, "at least one byte")
        needless = self.journal_bytes is not None and self.journal is None
        self._require("journal_bytes", not needless, "left out unless there is a --journal")
        self._require("pool_bytes", self.pool_bytes is None or self.pool_bytes >= 1, "at least one byte")
        self._require("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        self._require("max_total_tokens", self.max_total_tokens is None or self.max_total_tokens >= 1, "at least 1")
        self._require("page_size", self.page_size >= 1, "at least 1")
        enough = self.max_total_tokens is None or self.max_total_tokens >= self.page_size
        self._require("max_total_tokens", enough, f"at least a page, --page-size {self.page_size}")
        workload = self.static_workload
        ok = len(workload) == 2 and all(n >= 1 for n in workload)
        self._require("static_workload", ok, "two lengths such as 1024,256")
        if self.static_split is None:
            return
        self._require("static_split", self.memory == "static", "left out unless --memory is static")
        shares = self.static_split.values()
        self._require("static_split", all(share > 0 for share in shares), "positive shares")
        self._require("static_split", 0 < sum(shares) <= 1 + 1e-9, "shares that sum to at most 1")


_SEQS, _BATCHED_TOKENS = 256, 2048


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """How many sequences run at once and how many tokens one step takes."""

    max_num_seqs: int = setting(
        "--max-num-seqs",
        "sequences that run at once; on a GPU the default is 512",
        default=_SEQS,
        aliases=("--max-running-requests",),
    )
    max_num_batched_tokens: int = setting(
        "--max-num-batched-tokens",
        "tokens of one step, prefill chunks and decodes together; on a GPU the default is 8192",
        default=_BATCHED_TOKENS,
        aliases=("--chunked-prefill-size",),
        parse=parse_size,
    )

    def __post_init__(self) -> None:
        self._require("max_num_seqs", self.max_num_seqs >= 1, "at least 1")
        # Each running sequence must get its token every step, or the oldest could starve.
        enough = self.max_num_batched_tokens >= self.max_num_seqs
        self._require("max_num_batched_tokens", enough, f"at least --max-num-seqs ({self.max_num_seqs})")


@dataclass(frozen=True)
class DeviceConfig(Checked):
    """Where the model runs and how."""

    device: str = setting(
        "--device",
        "where the model runs; auto takes the GPU if there is one",
        default="auto",
        choices=("auto", "cpu", "cuda"),
    )
    attention_backend: str = setting(
        "--attention-backend",
        "kernels that read the arena; auto: triton on a GPU, torch on a CPU",
        default="auto",
        choices=("auto", "triton", "torch"),
    )
    enforce_eager: bool = setting(
        "--enforce-eager",
        "no CUDA graphs and no compiled layers: starts faster, runs slower",
        default=False,
        aliases=("--disable-cuda-graph",),
    )

    def __post_init__(self) -> None:
        self._require_choices()


DEVICE_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "cpu": {},
    "cuda": {"max_num_batched_tokens": 8192, "max_num_seqs": 512},
}
"""What is the default on a device, where that is more than the field's own."""


@dataclass(frozen=True)
class EngineConfig:
    """All of it, composed."""

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def build(cls, **values: Any) -> EngineConfig:
        """From flat keyword arguments, each given to the layer that has it.

        ConfigError for a name no layer has. This is what `LLM(**engine_args)`, the command line and YAML share.
        """
        # A default must not be what refuses another setting.
        if type(values.get("max_num_seqs")) is int:
            values.setdefault("max_num_batched_tokens", max(_BATCHED_TOKENS, values["max_num_seqs"]))
        elif type(tokens := values.get("max_num_batched_tokens")) is int and tokens > 0:
            values.setdefault("max_num_seqs", min(_SEQS, tokens))
        layers: dict[str, dict[str, Any]] = {name: {} for name in LAYERS}
        for name, value in values.items():
            layers[_owner(name)][name] = value
        return cls(**{name: LAYERS[name](**given) for name, given in layers.items()})

    def on(self, device: str, given: Collection[str]) -> EngineConfig:
        """The same on this very device ("cpu" or "cuda"); what was not `given` takes the default there."""
        layers: dict[str, Any] = {"device": dataclasses.replace(self.device, device=device)}
        for name, value in DEVICE_DEFAULTS[device].items():
            owner = _owner(name)
            if name not in given:
                config = layers.get(owner, getattr(self, owner))
                most = config.max_num_batched_tokens if name == "max_num_seqs" else value
                layers[owner] = dataclasses.replace(config, **{name: max(min(value, most), getattr(config, name))})
        return dataclasses.replace(self, **layers)


LAYERS: Mapping[str, type] = {
    "model": ModelConfig,
    "memory": MemoryConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
}


def _owner(name: str) -> str:
    for layer, config in LAYERS.items():
        if any(spec.name == name for spec in dataclasses.fields(config)):
            return layer
    raise ConfigError(f"unknown setting {name!r}")
