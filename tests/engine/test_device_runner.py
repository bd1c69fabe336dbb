"""The GPU's executor gives Transformers' own tokens: through Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import lane_counts, token_counts
from isthmus.memory import Pool
from isthmus.model.compile import prepare
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.toy_tokenizers import byte_level
from tests.model.harness import paged, reference, tiny

SIZE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GEMMA = {
    **SIZE,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "query_pre_attn_scalar": 11,
}


def engine_on(
    device: str,
    model: PreTrainedModel,
    *,
    page_size: int = 4,
    budget: int = 24,
    graphs: bool = False,
    compact: bool = False,
) -> Engine:
    """An engine over a poisoned arena that is too small for everybody at once."""
    layout = derive(model, page_size, "float32")
    pool = Pool(1 << 17, layout.groups)
    arena = torch.empty(pool.arena_bytes, dtype=torch.uint8, device=device)
    sizes = {True: lane_counts(4), False: token_counts(budget)} if graphs else {}
    runner = DeviceRunner(model, layout, arena, pool.ids("tokens").capacity, 4, budget, 128, (), graphs=sizes, poison=True)
    return Engine(
        pool,
        runner,
        byte_level(),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
        max_model_len=128,
        vocab_size=200,
    )


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, *, compact: bool
) -> list[list[int]]:
    """Tokens of each prompt, all queued at once; the audit holds after every step."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        if compact:
            engine.pool.compact()
        for output in engine.step():
            tokens[int(output.request_id)] += output.outputs[0].token_ids
        engine.pool.check()
    return tokens


@pytest.mark.parametrize("compact", [False, True])
def test_greedy_tokens_are_transformers(device: str, compact: bool) -> None:
    """Chunked prompts and decodes mixed, more sequences than rows, preemption, moved pages, NaN wherever nobody is."""
    model = tiny("gemma3_text", **GEMMA)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (n,), generator=draw).tolist() for n in (37, 1, 23, 9, 30, 17)]
    expected = [reference(model, prompt, 12) for prompt in prompts]
    assert all(len(set(tokens)) >= 5 for tokens in expected), "degenerate tokens prove nothing"
    twin = paged(model).requires_grad_(False).to(device)
    graphs = device == "cuda"
    prepare(twin, compiled=graphs)
    engine = engine_on(device, twin, graphs=graphs)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert complete(engine, prompts, params, compact=compact) == expected
    if compact:
        assert sum(engine.pool.moved_pages.values()) > 0
