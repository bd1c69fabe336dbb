"""The A/B of docs/ab.md in one process on the GPU's executor: green, and red on the founding bug after enough churn."""

from __future__ import annotations

import pytest
import torch

from isthmus.engine.core import Engine
from isthmus.engine.device_runner import DeviceRunner
from tests.engine.short_tables import ShortTables
from tests.engine.test_device_runner import random_prompts
from tests.model.device_serving import ModelOnDevice, greedy, on_device
from tests.model.families import GEMMA, F, S
from tests.model.harness import tiny

PROMPTS, OUTPUT = random_prompts(10, 7), 4
ARENA_BYTES = 12 << 10

Round = list[list[int]]


@pytest.fixture
def served(device: str) -> ModelOnDevice:
    """Two window layers and a full one, so that a window page is as large as two full ones."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny("gemma3_text", seed=3, **GEMMA | heads, num_hidden_layers=3, layer_types=[S, S, F])
    return on_device(model, device, torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # it reads poison, through the interpreter
def test_a_short_copy_of_a_table_is_right_at_first_and_red_after_enough_churn(served: ModelOnDevice) -> None:
    """And true tables are right in both rounds."""
    static, _ = two_rounds(served, walls=True)
    unified, highest = two_rounds(served)
    faulty, _ = two_rounds(served, ShortTables)
    own = ARENA_BYTES // next(group.spec.page_bytes for group in served.layout.groups if group.kind == "window")
    assert highest[0] < own < highest[1], "ids must pass the window group's own pages in the second round"
    assert all(len(set(tokens)) == OUTPUT for tokens in static[0]), "degenerate tokens prove nothing"
    assert unified == static
    assert faulty[0] == static[0]
    assert faulty[1] != static[1]


def two_rounds(
    served: ModelOnDevice, executor: type[DeviceRunner] = DeviceRunner, *, walls: bool = False
) -> tuple[list[Round], list[int]]:
    """The tokens of each round, and the highest id in use in it."""
    engine: Engine = served.engine(
        budget=16,
        arena_bytes=ARENA_BYTES,
        walls=[(len(prompt), OUTPUT) for prompt in PROMPTS] if walls else None,
        graphs=served.device == "cuda",
        executor=executor,
    )
    tokens: list[Round] = []
    highest = [0, 0]

    def look(_: int) -> None:
        ids = engine.pool.ids("tokens").live_ids()
        highest[len(tokens)] = max(highest[len(tokens)], *map(int, ids), 0)

    while len(tokens) < 2:
        tokens.append(greedy(engine, PROMPTS, [OUTPUT] * len(PROMPTS), look))
    return tokens, highest
