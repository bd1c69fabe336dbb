"""The GPU's executor gives Transformers' own tokens, and the CPU executor's in everything that a request can ask for:
through Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from isthmus.engine.config import SchedulerConfig
from isthmus.engine.core import Engine
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.graphs import lane_counts, token_counts
from isthmus.engine.output import CompletionOutput, RequestOutput, TokenLogprob
from isthmus.engine.runner import Runner
from isthmus.engine.sampler import Sampler
from isthmus.memory import Pool
from isthmus.model.compile import prepare
from isthmus.model.layout import derive
from isthmus.params import SamplingParams
from tests.engine.toy_tokenizers import byte_level, token_id
from tests.model.families import ATTENTION
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
GEMMA: dict[str, Any] = {
    **SIZE,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "query_pre_attn_scalar": 11,
}
ROWS, LONGEST = 4, 128
EOS = token_id(byte_level(), "<eos>")
ENDLESS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def engine_on(
    device: str,
    model: PreTrainedModel,
    *,
    page_size: int = 4,
    budget: int = 24,
    graphs: bool = False,
    arena_bytes: int = 1 << 17,
    cache_dtype: str = "float32",
    reference_runner: bool = False,
    prefix_caching: bool = False,
) -> Engine:
    """An engine over a poisoned arena that, unless told otherwise, is too small for everybody at once."""
    layout = derive(model, page_size, cache_dtype)
    pool = Pool(arena_bytes, layout.groups)
    ids = pool.capacities
    runner: Runner | DeviceRunner
    if reference_runner:
        runner = Runner(model, layout, arena_bytes, ids, ROWS, Sampler((EOS,), layout.vocab_size), poison=True)
    else:
        arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        sizes = {True: lane_counts(ROWS), False: token_counts(budget)} if graphs else {}
        runner = DeviceRunner(
            model, layout, arena, ids, ROWS, budget, LONGEST, (EOS,), graphs=sizes, poison=True, early=True,
        )  # fmt: skip
    return Engine(
        pool,
        runner,
        byte_level(),
        SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=budget),
        max_model_len=LONGEST,
        vocab_size=layout.vocab_size,
        eos_token_ids=(EOS,),
        prefix_caching=prefix_caching,
    )


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, *, compact: bool
) -> list[list[int]]:
    """Tokens of each prompt, all queued at once; the audit holds after every step."""
    between = (lambda _: engine.pool.compact()) if compact else None
    outputs = serve(engine, [(prompt, params) for prompt in prompts], between)
    return [output.outputs[0].token_ids for output in outputs]


def serve(
    engine: Engine,
    asked: Sequence[tuple[Sequence[int], SamplingParams]],
    between: Callable[[int], object] | None = None,
) -> list[RequestOutput]:
    """What comes of requests that are queued at once; nothing is left in use. `between` gets the number of steps."""
    results = []
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), prompt, params)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        results.append(RequestOutput(str(i), None, list(prompt), outputs))
    while engine.has_work:
        if between is not None:
            between(engine.scheduler.counters.steps)
        for output in engine.step():
            results[int(output.request_id)].merge(output)
        engine.pool.check()
    assert in_use(engine) == 0
    return results


def in_use(engine: Engine) -> int:
    """Pages that requests own."""
    usage = engine.pool.usage(engine.scheduler.placement.idle)
    return sum(group.live_pages for group in usage.groups.values())


def random_prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(5, 200, (n,), generator=draw).tolist() for n in lengths]


def on_device(model: PreTrainedModel, device: str, *, compiled: bool) -> PreTrainedModel:
    """The same weights behind attention "isthmus", as a device runs them."""
    twin = paged(model).requires_grad_(False).to(device)
    prepare(twin, compiled=compiled)
    return twin


# -- Transformers' tokens -----------------------------------------------------------------------------------


def test_greedy_tokens_are_transformers(device: str) -> None:
    """Chunked prompts and decodes mixed, more sequences than rows, preemption, moved pages, NaN wherever nobody is."""
    model = tiny("gemma3_text", **GEMMA)
    prompts = random_prompts(21, 9, 1, 25, 14)
    expected = [reference(model, prompt, 9) for prompt in prompts]
    assert all(len(set(tokens)) >= 5 for tokens in expected), "degenerate tokens prove nothing"
    graphs = device == "cuda"
    engine = engine_on(device, on_device(model, device, compiled=graphs), graphs=graphs, arena_bytes=48 << 10)
    params = SamplingParams(max_tokens=9, **ENDLESS)

    def disturb(steps: int) -> None:
        engine.pool.compact()
        if steps in (3, 8):
            engine.scheduler.preempt(engine.scheduler.running[-1])

    outputs = serve(engine, [(prompt, params) for prompt in prompts], disturb)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(engine.pool.moved_pages.values()) > 0
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("family", ["gemma2", "gemma4-e2b", "gpt_oss", "qwen3"])
def test_families_give_transformers_tokens(device: str, family: str) -> None:
    """Soft caps; shared rows and two head sizes; sinks and experts; full attention. A prompt is past the window."""
    model_type, values = ATTENTION[family]
    if "layer_types" in values:
        values = {"num_hidden_layers": len(values["layer_types"]), **values}
    model = tiny(model_type, **values)
    prompts = random_prompts(21, 1, 10)
    expected = [reference(model, prompt, 6) for prompt in prompts]
    assert all(len(set(tokens)) >= 3 for tokens in expected), "degenerate tokens prove nothing"
    # In float32 Transformers' experts read their loads back to the host, which no graph can hold.
    graphs = device == "cuda" and family != "gpt_oss"
    engine = engine_on(device, on_device(model, device, compiled=graphs), graphs=graphs, budget=16)
    params = SamplingParams(max_tokens=6, **ENDLESS)
    assert complete(engine, prompts, params, compact=True) == expected


# -- the CPU executor's results ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    """A window layer and a full one, and a token for each of the tokenizer's."""
    vocabulary = byte_level().get_vocab_size()
    types = ["sliding_attention", "full_attention"]
    return tiny("gemma3_text", **GEMMA | {"vocab_size": vocabulary, "num_hidden_layers": 2, "layer_types": types})


def both(device: str, model: PreTrainedModel, **settings: Any) -> tuple[Engine, Engine]:
    """The same engine on the device, and with the CPU's executor."""
    theirs = engine_on("cpu", paged(model), reference_runner=True, **settings)
    ours = engine_on(device, on_device(model, device, compiled=False), graphs=device == "cuda", **settings)
    return ours, theirs


def assert_equal(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    """Token for token; log probabilities up to rounding."""
    for request, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(mine.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids, f"request {request}"
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
            assert_close(a.logprobs, b.logprobs)
        assert_close(mine.prompt_logprobs, other.prompt_logprobs)


def assert_close(
    ours: Sequence[dict[int, TokenLogprob] | None] | None, theirs: Sequence[dict[int, TokenLogprob] | None] | None
) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert [(token, x.rank) for token, x in mine.items()] == [(token, x.rank) for token, x in other.items()]
            assert [x.logprob for x in mine.values()] == pytest.approx([x.logprob for x in other.values()], abs=1e-3)


def test_every_parameter_does_what_it_does_on_a_cpu(device: str, small: PreTrainedModel) -> None:
    """Greedy, drawn, edited and scored rows share steps. Draws take the same numbers, so the tokens are the same."""
    (prompt,) = random_prompts(18)
    short = prompt[:7]
    ends = {EOS: 60.0}  # the most likely token, wherever it is allowed
    asked = [
        (prompt, SamplingParams(max_tokens=7, **ENDLESS)),
        (prompt, SamplingParams(max_tokens=7, repetition_penalty=1.6, presence_penalty=1.5, frequency_penalty=1.0,
                                **ENDLESS)),
        (short, SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=7, ignore_eos=True)),
        (short, SamplingParams(temperature=1.3, top_k=20, min_p=0.01, seed=4, max_tokens=4, logprobs=0)),
        (short, SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=4, ignore_eos=True)),
        (prompt, SamplingParams(logprobs=3, prompt_logprobs=2, max_tokens=3, **ENDLESS)),
        (short, SamplingParams(temperature=0, logit_bias={7: 100.0}, max_tokens=1)),
        (short, SamplingParams(temperature=0, logit_bias=ends, min_tokens=2, max_tokens=6)),
    ]  # fmt: skip
    ours, theirs = (serve(engine, asked) for engine in both(device, small))
    assert_equal(ours, theirs)
    plain, penalised, _, _, twice, scored, biased, held = ours
    assert plain.outputs[0].token_ids != penalised.outputs[0].token_ids
    assert twice.outputs[0].token_ids != twice.outputs[1].token_ids
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(prompt)
    assert biased.outputs[0].token_ids == [7]
    assert (len(held.outputs[0].token_ids), held.outputs[0].finish_reason) == (3, "stop")


def test_a_grammar_holds_beside_free_rows(device: str, small: PreTrainedModel) -> None:
    llguidance = pytest.importorskip("llguidance", reason="grammars need the extra isthmus[structured]")
    grammar = llguidance.LLMatcher.grammar_from_regex("(the cat|der B[aä]r){1,2}")
    short, other = random_prompts(6, 9)
    asked = [
        (short, SamplingParams(temperature=0, grammar=grammar, max_tokens=20)),
        (other, SamplingParams(max_tokens=5, **ENDLESS)),
        (other, SamplingParams(seed=6, grammar=grammar, max_tokens=20)),
    ]
    ours, theirs = (serve(engine, asked) for engine in both(device, small))
    assert_equal(ours, theirs)
    assert ours[0].outputs[0].text.startswith(("the cat", "der B"))
    assert ours[0].outputs[0].finish_reason == "stop"


def test_fp8_pages_hold_what_a_cpu_puts_there(device: str, small: PreTrainedModel) -> None:
    """Rows rounded to fp8, whether read from pages or as a chunk's own."""
    asked = [(prompt, SamplingParams(max_tokens=6, logprobs=1, **ENDLESS)) for prompt in random_prompts(27, 5)]
    settings: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "page_size": 16, "budget": 16}
    ours, theirs = (serve(engine, asked) for engine in both(device, small, **settings))
    assert_equal(ours, theirs)
    exact = serve(engine_on("cpu", paged(small), reference_runner=True), asked)
    with pytest.raises(AssertionError):
        assert_equal(ours, exact)  # rounding is there to be seen


def test_warm_prefixes_give_cold_tokens(device: str, small: PreTrainedModel) -> None:
    (prompt,) = random_prompts(26)
    params = SamplingParams(max_tokens=4, **ENDLESS)
    asked = [(prompt, params), ([*prompt[:21], 9, 8, 7], params)]
    ours, theirs = both(device, small, prefix_caching=True, arena_bytes=1 << 18)
    assert_equal(serve(ours, asked[:1]), serve(theirs, asked[:1]))
    warm = serve(ours, asked)
    assert all(output.num_cached_tokens >= 16 for output in warm)
    assert_equal(warm, serve(engine_on("cpu", paged(small), reference_runner=True), asked))


def test_an_abort_in_flight_leaves_the_others_alone(device: str, small: PreTrainedModel) -> None:
    """Its row goes to the next in line while the step that still has it may be running."""
    prompts = random_prompts(5, 6, 7, 8, 9)
    params = SamplingParams(max_tokens=6, **ENDLESS)
    ours, theirs = both(device, small, arena_bytes=1 << 18)
    expected = complete(theirs, prompts, params, compact=False)
    for i, prompt in enumerate(prompts):
        ours.add_request(str(i), prompt, params)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    aborted = False
    while ours.has_work:
        for output in ours.step():
            tokens[output.request_id] += output.outputs[0].token_ids
        ours.pool.check()
        if not aborted and len(tokens["1"]) == 2:
            aborted = ours.abort("1")
    assert in_use(ours) == 0
    assert len(tokens["1"]) == 2
    assert tokens["1"] == expected[1][:2]
    assert [tokens[str(i)] for i in (0, 2, 3, 4)] == [expected[i] for i in (0, 2, 3, 4)]
