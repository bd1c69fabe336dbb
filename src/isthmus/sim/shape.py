"""What a step of a model reads and computes, from lengths alone.

weights     read once a step; of experts those that somebody in the step is routed to (in expectation)
caches      of every sequence what its query sees and what the step adds; states read and written
flops       of every token through the layers, of every sampled one through the head, of every query-key pair
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError
from isthmus.memory import Group, opaque_spec

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Of one step, or of several (arrays of one shape)."""

    layers: int
    sequences: int
    weights: float  # bytes
    caches: Float64  # bytes read or written, those that are moved included
    products: float  # operations on weights
    pairs: Float64  # operations on keys and values
    exchanges: int = 0  # all-reduces
    exchanged: float = 0.0  # bytes of all of them


@dataclass(frozen=True)
class Shape:
    """One rank of a model, as far as the time of a step goes."""

    layers: int
    dense_bytes: float  # of weights that every step reads
    token_flops: float  # of a token through all layers, the experts it is routed to included
    sample_flops: float = 0.0  # of a sampled token besides: the head
    expert_bytes: float = 0.0  # of all experts' weights
    experts: int = 1
    experts_per_token: int = 1
    pair_flops: Mapping[str, float] = field(default_factory=dict)  # group -> of a query and a key, all layers together
    exchanges: int = 0  # all-reduces of a step
    exchange_bytes: float = 0.0  # of a token in all of them

    def work(self, groups: Sequence[Group], past: Int64, new: Int64, samples: int, moved_bytes: int = 0) -> Work:
        """Of steps in which sequences with `past` cached tokens go on by `new`.

        Args:
            past: [..., sequences].
            new: [sequences], at least 1 each.
            samples: how many of them need a token.
            moved_bytes: of pages that change their place or are copied.
        """
        tokens = int(new.sum())
        touched = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        caches = np.full(past.shape[:-1], 2.0 * moved_bytes)
        flops = np.zeros(past.shape[:-1])
        for group in groups:
            if group.kind == "state":
                caches = caches + 2.0 * group.spec.page_bytes * len(new)
                continue
            seen = past if group.window is None else np.minimum(past, group.window)
            caches = caches + group.spec.token_bytes * (seen.sum(-1) + tokens)
            pair = self.pair_flops.get(group.name, 0.0)
            if pair:
                flops = flops + pair * pairs(past, new, group.window).sum(-1)
        weights = self.dense_bytes + self.expert_bytes * touched
        products = self.token_flops * tokens + self.sample_flops * samples
        exchanged = self.exchange_bytes * tokens
        return Work(self.layers, len(new), weights, caches, products, flops, self.exchanges, exchanged)


def pairs(past: Int64, new: Int64, window: int | None) -> Int64:
    """Keys that the queries at past .. past + new - 1 see, their own tokens included."""
    whole: Int64 = new * past + new * (new + 1) // 2
    if window is None:
        return whole
    short = np.clip(window - past, 0, new)  # queries that see everything before them
    seen: Int64 = short * past + short * (short + 1) // 2 + (new - short) * window
    return seen


@dataclass(frozen=True)
class Model:
    """What is simulated: its layer groups and what its steps cost."""

    name: str
    groups: tuple[Group, ...]
    shape: Shape
    max_model_len: int


def read_model(path: Path) -> Model:
    """A model written down by hand, as JSON (docs/simulate.md has an example). ConfigError says what is wrong."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--groups {path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise ConfigError(f"--groups {path}: not JSON: {error}") from error
    if not isinstance(data, Mapping) or not isinstance(data.get("groups"), list) or not data["groups"]:
        raise ConfigError(f'--groups {path}: an object with "groups", a list of them, is due')
    groups = [_group(entry, f"--groups {path}: group {i}") for i, entry in enumerate(data["groups"])]
    if len({group.name for group in groups}) != len(groups):
        raise ConfigError(f"--groups {path}: every group needs its own name")
    if len({group.spec.page_size for group in groups if group.space == "tokens"}) > 1:
        raise ConfigError(f"--groups {path}: groups of tokens share their ids, so they need one page_size")
    pair_flops = {entry["name"]: float(entry["pair_flops"]) for entry in data["groups"] if "pair_flops" in entry}
    try:
        shape = Shape(**data.get("shape", {}), pair_flops=pair_flops)
        length = int(data["max_model_len"])
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f'--groups {path}: "shape" or "max_model_len": {error}') from error
    return Model(str(data.get("name", path.stem)), tuple(groups), shape, length)


def _group(entry: Any, where: str) -> Group:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: an object is due")
    known = {"name", "kind", "page_bytes", "page_size", "window", "pair_flops"}
    if set(entry) - known:
        raise ConfigError(
            f"{where}: unknown {', '.join(sorted(set(entry) - known))}; known: {', '.join(sorted(known))}"
        )
    try:
        spec = opaque_spec(entry["page_bytes"], entry.get("page_size", 1))
        return Group(entry["name"], spec, entry["kind"], entry.get("window"))
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
