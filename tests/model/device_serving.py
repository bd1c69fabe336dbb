"""Tiny models of the table of families on the GPU's executor, over a poisoned arena, unified or with walls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from isthmus.engine import capacity
from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import lane_counts, token_counts
from isthmus.memory import Pool
from isthmus.model.compile import prepare
from isthmus.model.layout import ModelLayout, derive
from isthmus.params import SamplingParams
from tests.engine.test_device_runner import ENDLESS, random_prompts, serve
from tests.engine.toy_tokenizers import byte_level
from tests.model.families import config_of
from tests.model.harness import reference, tiny

ROWS, LONGEST = 4, 128
DECIDED = 2e-4
"""By how much the reference must have made each of its choices, in parts of the largest logit. A GPU sums in another
order, which in float32 moves logits by a hundredth of it; so the tokens are asked to be equal, without a tolerance."""

DRAWS = 20
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


def everywhere(families: Iterable[Any], interpreted: Sequence[Any]) -> list[Any]:
    """Parameters `(device, row)`: all rows on a GPU; a few, which are slow, through Triton's interpreter in CI."""
    here = [pytest.param("cpu", row, marks=INTERPRETED) for row in interpreted]
    return [*here, *(pytest.param("cuda", row, marks=pytest.mark.gpu) for row in families)]


def require(family: str) -> tuple[str, dict[str, Any]]:
    """The row; skips the test if the installed Transformers does not know the family."""
    model_type, values = config_of(family)
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    return model_type, values


@dataclass(frozen=True)
class Case:
    """A model in float32 on the CPU, and what Transformers says."""

    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


def decided(family: str, lengths: Sequence[int], news: Sequence[int]) -> Case:
    """The first draw of weights whose greedy tokens vary and are told apart by more than rounding."""
    model_type, values = require(family)
    prompts = random_prompts(*lengths)
    for seed in range(DRAWS):
        model = tiny(model_type, seed=seed, **values)
        expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
        closest = min(margin(model, *pair) for pair in zip(prompts, expected, strict=True))
        if closest > DECIDED and all(len(set(tokens)) > len(tokens) // 3 for tokens in expected):
            return Case(model, prompts, expected)
    raise AssertionError(f"{family}: every draw of its weights repeats itself, or is undecided somewhere")


def margin(model: PreTrainedModel, prompt: Sequence[int], continuation: Sequence[int]) -> float:
    """By how much the closest choice of a greedy continuation was made, in parts of the largest logit there."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *continuation[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.float().topk(2).values
    return float(((best[:, 0] - best[:, 1]) / logits.abs().amax(-1)).min())


def on_device(model: PreTrainedModel, device: str, dtype: torch.dtype, *, compiled: bool = False) -> ModelOnDevice:
    """The same weights behind attention "isthmus", rounded to `dtype`, as the GPU's executor takes them."""
    twin = AutoModelForCausalLM.from_config(model.config, attn_implementation="isthmus", dtype=dtype).eval()
    twin.load_state_dict(model.state_dict())
    twin.requires_grad_(False).to(device)
    layout = derive(twin, 4, str(dtype).removeprefix("torch."))
    prepare(twin, compiled=compiled)
    return ModelOnDevice(twin, layout, device)


@dataclass(frozen=True)
class ModelOnDevice:
    """Ready to be served, by one engine after the other."""

    model: PreTrainedModel
    layout: ModelLayout
    device: str

    def engine(
        self,
        *,
        budget: int,
        arena_bytes: int = 1 << 22,
        walls: Sequence[tuple[int, int]] | None = None,
        graphs: bool = False,
        executor: type[DeviceRunner] = DeviceRunner,
    ) -> Engine:
        """Over a poisoned arena of its own; there is room for everybody in it unless told otherwise.

        budget: tokens of a step.
        walls: the lengths that they are best for; None: there are none.
        """
        groups = self.layout.groups
        parts = None if walls is None else capacity.best_walls(groups, arena_bytes, walls)
        pool = Pool(arena_bytes, groups, walls=parts)
        sizes = {True: lane_counts(ROWS, ROWS)} if graphs else {}
        if graphs and not any(group.kind == "state" for group in groups):
            sizes[False] = token_counts(budget)
        arena = torch.empty(arena_bytes, dtype=torch.uint8, device=self.device)
        runner = executor(
            self.model, self.layout, arena, pool.capacities, ROWS, budget, LONGEST, (), graphs=sizes, poison=True,
            early=True,
        )  # fmt: skip
        return Engine(
            pool,
            runner,
            byte_level(),
            SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=budget),
            max_model_len=LONGEST,
            vocab_size=self.layout.vocab_size,
            eos_token_ids=(),
            prefix_caching=False,
        )


def greedy(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    news: Sequence[int],
    between: Callable[[int], object] | None = None,
) -> list[list[int]]:
    """Tokens of each prompt, all queued at once; see `tests.engine.test_device_runner.serve`."""
    asked = [(p, SamplingParams(max_tokens=n, **ENDLESS)) for p, n in zip(prompts, news, strict=True)]
    return [output.outputs[0].token_ids for output in serve(engine, asked, between)]
