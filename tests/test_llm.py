"""The offline API on a tiny hybrid model with random weights."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from isthmus.engine import capacity
from isthmus.engine.runner import Runner
from isthmus.errors import ConfigError
from isthmus.llm import LLM, RequestOutput, SamplingParams
from isthmus.memory import Group, Pool, opaque_spec
from isthmus.memory.journal import DEFAULT_BYTES
from isthmus.memory.replay import Replay
from isthmus.params import RequestError
from tests.engine.toy_tokenizers import byte_level, token_id

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TEMPLATE = "{% for m in messages %}<eos>{{ m.role }}:{{ m.content }}{% endfor %}<eos>assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sliding layers of window 8 and a full one; a byte-level tokenizer that puts `<eos>` before a text."""
    path = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer.from_str(byte_level().to_str())
    raw.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", token_id(raw, "<eos>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.save_pretrained(path)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    model.tie_weights()
    model.save_pretrained(path)
    return path


def build(folder: Path, **changes: Any) -> LLM:
    settings = {"dtype": "float32", "pool_bytes": 1 << 20, "page_size": 4, "max_num_seqs": 8}
    return LLM(str(folder), **settings | {"max_num_batched_tokens": 16} | changes)


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return build(folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert not shared_llm.engine.has_work
    assert shared_llm.usage().live == 0


def reference(folder: Path, ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def test_text_and_ids_mixed_come_back_in_order_with_transformers_tokens(folder: Path, llm: LLM) -> None:
    ids = llm.tokenizer("the cat sat").input_ids
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    seen: list[tuple[int, bool]] = []
    outputs = llm.generate(
        ["the cat sat", {"prompt_token_ids": ids * 4}, {"prompt": "the"}],
        [GREEDY, short, GREEDY],
        use_tqdm=False,
        on_output=lambda i, output: seen.append((i, output.finished)),
    )
    assert [o.prompt for o in outputs] == ["the cat sat", None, "the"]
    for output, count in zip(outputs, (20, 3, 20), strict=True):
        assert output.outputs[0].token_ids == reference(folder, output.prompt_token_ids, count)
        assert output.outputs[0].finish_reason == "length"
        whole = llm.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert llm.tokenizer.decode(output.prompt_token_ids) + output.outputs[0].text == whole
    assert sorted(i for i, finished in seen if finished) == [0, 1, 2]
    assert seen.count((0, False)) == 19


@pytest.mark.parametrize("settings", [{"memory": "static"}, {"page_size": 1}, {"pool_bytes": 40_000, "page_size": 1}])
def test_tokens_do_not_depend_on_memory(folder: Path, llm: LLM, settings: dict[str, Any]) -> None:
    prompts = ["the cat sat on the mat " * n for n in (1, 3, 2, 1, 4)]
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    other = build(folder, **settings)
    assert [o.outputs[0].token_ids for o in other.generate(prompts, GREEDY, use_tqdm=False)] == want
    assert other.usage().live == 0


def test_seeds_hold_alone_and_in_company_and_n_sequences_differ(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate("the cat", params, use_tqdm=False)
    _, together = llm.generate(["the mat", "the cat"], [SamplingParams(n=2), params], use_tqdm=False)
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in together.outputs]
    assert len({tuple(o.token_ids) for o in alone.outputs}) == 3


def test_stream_yields_the_same_text_and_stopping_early_frees_everything(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, stop=["zzzz"], ignore_eos=True)
    (whole,) = llm.generate("the cat", params, use_tqdm=False)
    pieces = list(llm.stream("the cat", params))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for _ in llm.stream("the cat", params):
        break
    assert llm.usage().live == 0


def test_streams_and_batches_interleave(llm: LLM) -> None:
    (want,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    stream = llm.stream("the cat", GREEDY)
    text = next(stream).outputs[0].text
    (other,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert other.outputs[0].token_ids == want.outputs[0].token_ids
    assert text + "".join(piece.outputs[0].text for piece in stream) == want.outputs[0].text


def test_logprobs_are_of_the_model(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, logit_bias={5: 100.0})
    (output,) = llm.generate("the cat", params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([output.prompt_token_ids])).logits[0, -1].log_softmax(-1)
    (entry,) = output.outputs[0].logprobs or []
    assert output.outputs[0].token_ids == [5]
    assert list(entry) == [5, *want.topk(2).indices.tolist()]
    assert [value.logprob for value in entry.values()] == pytest.approx(want[list(entry)].tolist(), abs=1e-4)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_the_call_after_the_step_and_the_engine_serves_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    launch, steps = llm.engine.executor.launch, 0

    def interrupted(step: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(pid, signal.SIGINT)
        return launch(step)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False)
    assert steps == 3
    assert not llm.engine.has_work
    assert llm.usage().live == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (output,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("when", ["in the middle of it", "before anything is held back"])
def test_a_second_ctrl_c_while_requests_are_aborted_damages_nothing(
    when: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    release, end, presses = llm.engine.pool.release, llm._end, 0

    def press() -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            signal.raise_signal(signal.SIGINT)

    def released(space: str, ids: Any) -> Any:
        press()
        return release(space, ids)

    def ended(names: Any) -> None:
        press()
        end(names)

    def stop(index: int, output: RequestOutput) -> None:
        if when == "in the middle of it":
            monkeypatch.setattr(llm.engine.pool, "release", released)
        else:
            monkeypatch.setattr(llm, "_end", ended)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the mat " * 4, "a dog " * 4], GREEDY, use_tqdm=False, on_output=stop)
    monkeypatch.undo()
    assert presses > 1
    assert not llm.engine.scheduler.requests
    assert not llm._inboxes
    llm.engine.pool.check()
    (after,) = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_requests_are_queued_leaves_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add = llm.engine.scheduler.waiting.add

    def pressed(sequence: Any) -> None:
        add(sequence)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.scheduler.waiting, "add", pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    assert not len(llm.engine.scheduler.waiting)
    assert not llm._inboxes


def test_a_journal_ends_with_its_engine(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "life.journal"
    llm = build(folder, journal=str(path))
    llm.generate("the cat", GREEDY, use_tqdm=False)
    assert path.stat().st_size >= DEFAULT_BYTES
    del llm
    gc.collect()
    assert path.stat().st_size < DEFAULT_BYTES, "what the ring did not use is given back"
    assert [*Replay(path)], "and it replays"


def test_an_error_in_on_output_aborts_the_call(llm: LLM) -> None:
    def fail(index: int, output: RequestOutput) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False, on_output=fail)


def test_on_output_may_abort_a_request_and_the_others_finish(llm: LLM) -> None:
    def stop_first(index: int, output: RequestOutput) -> None:
        if index == 0 and len(output.outputs[0].token_ids) == 5:
            llm.engine.abort(output.request_id)

    first, second = llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False, on_output=stop_first)
    assert (first.finished, len(first.outputs[0].token_ids)) == (False, 5)
    assert (second.finished, len(second.outputs[0].token_ids)) == (True, 20)


def test_one_bad_prompt_starts_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: the prompt has 300 tokens and max_model_len is 256"):
        llm.generate(["the cat", {"prompt_token_ids": [1] * 300}], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate({"prompt_token_ids": []}, GREEDY, use_tqdm=False)
    strange: Any
    for strange in ([3], {"prompt": 5}, {"prompt": None}, [None], {}):
        with pytest.raises(RequestError, match=r"^a prompt is text"):
            llm.generate(strange, GREEDY, use_tqdm=False)
    for strange in (5, None, 1.5):
        with pytest.raises(RequestError, match=r"^prompts are one prompt or a list"):
            llm.generate(strange, GREEDY, use_tqdm=False)
    for strange in (5, "abc", None, {1: 2}):
        with pytest.raises(RequestError, match=r"^prompt_token_ids are a list"):
            llm.generate({"prompt_token_ids": strange}, GREEDY, use_tqdm=False)
    for strange in (["a"], [1.9], [True], [None]):
        with pytest.raises(RequestError, match="where a token id is due"):
            llm.generate({"prompt_token_ids": strange}, GREEDY, use_tqdm=False)
    for strange in (5, [5], "greedy"):
        with pytest.raises(ConfigError, match=r"^sampling_params are one SamplingParams or a list"):
            llm.generate(["the cat"], strange, use_tqdm=False)
    with pytest.raises(ConfigError, match="2 sampling_params for 1 prompts"):
        llm.generate("the cat", [GREEDY, GREEDY], use_tqdm=False)


def test_chat_renders_the_template_without_adding_special_tokens_twice(llm: LLM) -> None:
    question = [{"role": "user", "content": "the cat"}]
    with pytest.raises(RequestError, match="has no chat template"):
        llm.chat(question, GREEDY, use_tqdm=False)
    llm.tokenizer.chat_template = TEMPLATE
    try:
        (output,) = llm.chat(question, GREEDY, use_tqdm=False)
        two = llm.chat([question, question], GREEDY, use_tqdm=False)
    finally:
        llm.tokenizer.chat_template = None
    assert output.prompt == "<eos>user:the cat<eos>assistant:"
    assert output.prompt_token_ids.count(llm.tokenizer.eos_token_id) == 2
    assert [o.outputs[0].token_ids for o in two] == [output.outputs[0].token_ids] * 2


def test_what_a_chat_template_refuses_is_one_line_with_its_words(llm: LLM) -> None:
    strange: Any
    cases: list[tuple[str, Any, str]] = [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}], "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": 5}], "unsupported operand"),
        ("{% for m in messages", [{"role": "user", "content": "x"}], "end of template"),
    ]
    try:
        for template, messages, words in cases:
            llm.tokenizer.chat_template = template
            with pytest.raises(RequestError, match=f"^the chat template of .* refuses the messages: .*{words}"):
                llm.chat(messages, GREEDY, use_tqdm=False)
        for strange in ("hello", 5, None):
            with pytest.raises(RequestError, match=r"^messages are a list of objects"):
                llm.chat(strange, GREEDY, use_tqdm=False)
    finally:
        llm.tokenizer.chat_template = None


def test_lengths_count_every_sequence_of_a_request(llm: LLM) -> None:
    ids = {"prompt_token_ids": [5] * 7}
    lengths = llm.lengths([ids, ids], [SamplingParams(n=3, max_tokens=4), SamplingParams(max_tokens=9)])
    assert lengths == [(7, 4)] * 3 + [(7, 9)]


def test_one_arena_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    old, seen = weakref.ref(llm.engine.executor), []

    def build_beside(*args: Any, **settings: Any) -> Runner:
        seen.append(old())
        return Runner(*args, **settings)

    monkeypatch.setattr("isthmus.engine.backends.Runner", build_beside)
    with llm.static([(8, 8)]):
        pass
    assert seen == [None, None]


def test_walls_that_are_impossible_leave_the_engine_as_it_was(llm: LLM) -> None:
    engine = llm.engine
    with pytest.raises(ConfigError, match="which do not fit its wall of 1 bytes"), llm.static({"full": 1, "window": 1}):
        pass
    assert llm.engine is engine


def test_an_error_beside_a_running_stream_is_the_one_that_is_raised(llm: LLM) -> None:
    def leave_a_stream(error: type[Exception] | None) -> None:
        with llm.static([(8, 8)]):
            stream = llm.stream("the cat", GREEDY)
            streams.append(stream)
            next(stream)
            if error is not None:
                raise error

    streams: list[Iterator[RequestOutput]] = []
    with pytest.raises(LookupError):
        leave_a_stream(LookupError)
    assert llm.engine.pool.walls is None
    assert list(streams[0]) == []
    with pytest.raises(ConfigError, match="1 requests were aborted"):
        leave_a_stream(None)
    assert llm.engine.pool.walls is None
    assert len(llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 20


def test_logits_that_are_no_numbers_end_their_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = llm.engine.executor
    assert isinstance(runner, Runner)
    sampler, calls = runner.sampler, 0

    def broken(logits: torch.Tensor, samples: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            logits = logits.clone()
            logits[0, 3] = torch.nan
        return sampler(logits, samples)

    monkeypatch.setattr(runner, "sampler", broken)
    first, second = llm.generate(["the cat", "the mat"], GREEDY, use_tqdm=False)
    assert first.outputs[0].finish_reason == "abort"
    assert "use --dtype bfloat16 or float32" in str(first.outputs[0].stop_reason)
    assert len(first.outputs[0].token_ids) < 20 == len(second.outputs[0].token_ids)
    assert "NaN" in caplog.text


def test_static_walls_for_a_workload_and_back(llm: LLM) -> None:
    prompts = ["the cat sat " * 3] * 3
    lengths = llm.lengths(prompts, GREEDY)
    assert lengths == [(len(llm.tokenizer(prompts[0]).input_ids), 20)] * 3
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with llm.static(lengths):
        walls = llm.engine.pool.walls
        assert walls is not None
        assert "walls: " in llm.certificate()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == want
    with llm.static(walls):
        assert llm.engine.pool.walls == walls
    assert llm.engine.pool.walls is None


def test_the_certificate_says_what_fits(llm: LLM) -> None:
    text = llm.certificate()
    count = capacity.concurrent(llm.engine.pool, 255)
    assert f"{count:,} sequences of 255 tokens fit together" in text
    assert capacity.fits(llm.engine.pool, 255, count)
    assert not capacity.fits(llm.engine.pool, 255, count + 1)
    total = capacity.total_tokens(llm.engine.pool, 255)
    assert count * 255 <= total < (count + 1) * 255
    assert f"{total:,} tokens fit" in text


def test_impossible_memory_is_one_line_with_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--pool-bytes 2,000 is smaller than one sequence.*needs [0-9,]+ bytes"):
        build(folder, pool_bytes=2000)
    with pytest.raises(ConfigError, match=r"^one sequence of 256 tokens needs [0-9,]+ bytes.*do not fit the arena"):
        build(folder, pool_bytes=20_000, max_model_len=256)
    with pytest.raises(ConfigError, match="more than the model's context of 256"):
        build(folder, max_model_len=257)
    with pytest.raises(ConfigError, match=r"^--pool-bytes 1,073,741,824,000,000 is more than the [0-9,]+ bytes"):
        build(folder, pool_bytes=1_000_000 << 30)
    with pytest.raises(
        ConfigError, match=r"^one sequence of 256 tokens needs 64 pages of 4 tokens, over --max-total-t"
    ):
        build(folder, max_total_tokens=20, max_model_len=256)
    walls = {"full": 0.999, "window": 0.0001}
    with pytest.raises(ConfigError, match=r"needs [0-9,]+ bytes of pages of group window, which do not fit its wall"):
        build(folder, memory="static", static_split=walls)
    with pytest.raises(ConfigError, match="raise --pool-bytes or lower --static-workload"):
        build(folder, memory="static", pool_bytes=20_000, static_workload=(1 << 20, 5))
    with pytest.raises(ConfigError, match="--static-split must give a share to each of full, window"):
        build(folder, memory="static", static_split={"full": 1.0})
    with pytest.raises(ConfigError, match="unknown setting 'max_model_length'"):
        build(folder, max_model_length=3)


def test_without_max_model_len_a_small_arena_shortens_the_context(folder: Path) -> None:
    llm = build(folder, pool_bytes=20_000)
    longest = llm.engine.scheduler.max_model_len
    assert 20 < longest < 256
    ids = [1] * (longest - 5)
    (output,) = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_a_cap_on_tokens_is_what_the_certificate_and_the_refusals_speak_of(folder: Path) -> None:
    llm = build(folder, max_total_tokens=42)
    assert llm.engine.scheduler.max_model_len == 41  # ten pages of 4, and the last token is not cached
    text = llm.certificate()
    assert "1 sequences of 40 tokens fit together" in text
    assert "40 tokens fit in sequences of up to 41 under --max-total-tokens 42" in text
    (output,) = llm.generate({"prompt_token_ids": [1] * 30}, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 11
    with pytest.raises(RequestError, match="max_model_len is 41"):
        llm.generate({"prompt_token_ids": [1] * 41}, GREEDY, use_tqdm=False)


def test_settings_that_do_nothing_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(folder)
    assert caplog.messages == []
    build(folder, gpu_memory_utilization=0.9, static_workload=(8, 8))
    assert [m.split()[0] for m in caplog.messages] == ["--gpu-memory-utilization", "--static-workload"]
    caplog.clear()
    build(folder, memory="static", static_workload=(8, 8), static_split={"full": 0.5, "window": 0.5})
    assert [m.split(":")[0] for m in caplog.messages] == [
        "--static-workload is ignored with --static-split, which says what it would find"
    ]
    caplog.clear()
    build(folder, memory="static", static_workload=(8, 8))
    assert caplog.messages == []


@pytest.mark.parametrize("arena", [1 << 36, (1 << 36) - 1, 1 << 25])
def test_shares_that_are_one_but_for_a_rounding_error_fit(arena: int) -> None:
    members = [Group("full", opaque_spec(1 << 20, 4), "append"), Group("window", opaque_spec(1 << 21, 4), "window", 9)]
    for full, window in ((0.5, 0.5 + 1e-9), (1 / 3, 2 / 3), (1e-9, 1.0)):
        walls = capacity.split_walls(members, arena, {"full": full, "window": window})
        Pool(arena, members, walls=walls)
        assert walls["full"] == pytest.approx(full * (arena - (1 << 21)), abs=100)


def test_best_walls_share_the_arena_by_what_sequences_hold() -> None:
    members = [
        Group("full", opaque_spec(64, 4), "append"),
        Group("window", opaque_spec(320, 4), "window", 64),
    ]
    short, long = (capacity.best_walls(members, 1 << 20, [(n, 16)]) for n in (16, 2048))
    assert short["window"] / short["full"] == pytest.approx(5, rel=0.05)
    assert long["full"] > long["window"]
    for walls, length in ((short, 32), (long, 2064)):
        assert sum(walls.values()) <= (1 << 20) - 320
        unified = capacity.concurrent(Pool(1 << 20, members), length)
        assert 0.85 * unified <= capacity.concurrent(Pool(1 << 20, members, walls=walls), length) <= unified
    skewed = capacity.best_walls(members, 1 << 16, [(16, 16)] * 99 + [(2048, 16)])
    assert capacity.fits(Pool(1 << 16, members, walls=skewed), 2064)
    with pytest.raises(ConfigError, match="cannot be split so that a request of 40,016 tokens fits"):
        capacity.best_walls(members, 1 << 16, [(40_000, 16)])
