"""From MODEL to what is simulated. What needs torch is imported when it is asked for, and nothing else here does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.engine.config import EngineConfig
from isthmus.sim.shape import Model, Shape

if TYPE_CHECKING:
    from isthmus.model.cost import ForwardCost
    from isthmus.model.layout import ModelLayout


@dataclass(frozen=True)
class Loaded:
    """A model and the arena that a GPU has for it."""

    model: Model
    source: str  # where the model's numbers are from
    arena_bytes: int
    arena_source: str


def load(config: EngineConfig, gpu: str | None, ranks: int = 1, weights: int | None = None) -> Loaded:
    """A preset, a config.json or whatever `serve` takes, as one of `ranks` sees it.

    Args:
        gpu: its memory, less weights and a reserve, is the arena, unless `config` has `pool_bytes`; None: the arena is
            that of `pool_bytes`, or what serving on a CPU takes.
        weights: bytes of the whole model, if the parameters are not stored as they are counted.

    ModelError if the model is not found or cannot be served; ConfigError if it does not fit.
    """
    from isthmus.plan import budget, gpus, shape  # noqa: PLC0415 (torch and Transformers)

    found = shape.load(config, ranks)
    money = budget.budget(found, config.memory, None if gpu is None else gpus.find(gpu), weights)
    layout, cost = found.layout, _cost(config, found.layout)
    stored = 1.0 if weights is None else weights / found.weight_bytes
    exchanges = 2 * cost.layers if ranks > 1 else 0
    itemsize = 4 if found.dtype == "float32" else 2
    cost_shape = Shape(
        layers=cost.layers,
        dense_bytes=cost.dense_bytes * stored / ranks,
        token_flops=cost.token_flops / ranks,
        sample_flops=cost.sample_flops / ranks,
        expert_bytes=cost.expert_bytes * stored / ranks,
        experts=cost.experts,
        experts_per_token=cost.experts_per_token,
        pair_flops={name: flops / ranks for name, flops in cost.pair_flops.items()},
        exchanges=exchanges,
        exchange_bytes=exchanges * cost.hidden_size * itemsize * 2 * (ranks - 1) / ranks,
    )
    name = found.name if ranks == 1 else f"{found.name} on {ranks} ranks"
    model = Model(name, layout.groups, cost_shape, config.model.max_model_len or layout.max_model_len)
    return Loaded(model, found.source, money.arena_bytes, money.arena_source)


def _cost(config: EngineConfig, layout: ModelLayout) -> ForwardCost:
    from isthmus.model.cost import count  # noqa: PLC0415
    from isthmus.plan import shape  # noqa: PLC0415

    return count(shape.build(config).model, layout)
