"""The offline API, named as in vLLM: LLM, SamplingParams, RequestOutput.

llm = LLM("demo")
for output in llm.generate(["An isthmus is", "The sea"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
from jinja2 import TemplateError

from isthmus import __version__
from isthmus.engine import capacity, sizing
from isthmus.engine.backends import backend_on, resolve_device
from isthmus.engine.config import CACHE_DTYPES, EngineConfig
from isthmus.engine.core import Engine
from isthmus.engine.laps import Laps
from isthmus.engine.output import CompletionOutput, RequestOutput, TokenLogprob
from isthmus.engine.products import bound_product_caches
from isthmus.engine.recorder import Recorder
from isthmus.engine.sanitizer import GuardedPool
from isthmus.engine.wide_frame import wide_frame
from isthmus.errors import ConfigError
from isthmus.memory import ArenaUsage, Journal, JournalError, Pool
from isthmus.model.layout import derive
from isthmus.model.source import build_model, resolve
from isthmus.params import RequestError, SamplingParams
from isthmus.progress import Progress

Prompt: TypeAlias = str | Mapping[str, Any]
"""Text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, the latter two with `"cache_salt"` if wanted: cached
prefixes are shared with prompts of the same salt alone."""

Message: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}` and whatever else the model's chat template reads."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """One prompt, tokenised."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


class LLM:
    """A model and an engine in this process.

    Args:
        model: hub id, directory, .gguf file, `demo` or `demo-chat`.
        engine_args: any setting of `isthmus.engine.config`: dtype, memory, device, page_size, pool_bytes,
            max_model_len, max_num_seqs, max_num_batched_tokens, load_format, static_split, ...

    ModelError for a model that cannot be loaded or served, ConfigError for settings that are wrong or impossible.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        asked = EngineConfig.build(model=model, **engine_args)
        bound_product_caches()
        self._laps = Laps()
        device = resolve_device(asked)
        self.config = asked.on(device, engine_args)
        _warn_of_idle(engine_args, self.config)
        self.journal = _journal(self.config)
        load_format = self.config.model.load_format
        source = resolve(self.config.model.model, load_format=load_format)
        self.name = source.name
        self.tokenizer: Any = source.load_tokenizer()
        self.dtype = _dtype(self.config.model.dtype, source.load_config().dtype)
        cache_dtype = CACHE_DTYPES[self.config.memory.kv_cache_dtype] or str(self.dtype).removeprefix("torch.")
        self._laps.lap("tokenizer and config")
        with _fitting():
            on_device = build_model(source, self.dtype, load_format=load_format, device=device)
            self._laps.lap("weights")
            self.layout = derive(on_device, self.config.memory.page_size, cache_dtype)
            self.end_token_ids = source.end_token_ids()  # ids after which a text is complete
            self._backend = backend_on(device, on_device, self.layout, self.config, self.end_token_ids, self._laps)
            self._names = itertools.count()
            self._inboxes: dict[str, deque[RequestOutput]] = {}  # by request: where its increments go
            arena_bytes = self._backend.arena_bytes()
            context = self.config.model.max_model_len or self.layout.max_model_len
            walls = sizing.walls(self.config.memory, self.layout.groups, arena_bytes, context)
            self.engine = self._build_engine(*self._pool(arena_bytes, walls))
            self._laps.lap("arena and graphs" if device == "cuda" else "arena")

    # -- requests -------------------------------------------------------------------------------------------

    @wide_frame
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts and return their outputs in order.

        Args:
            prompts: one or many; text gets the special tokens (BOS) its tokenizer adds by default.
            sampling_params: one for all, or one each.
            on_output: called after every step with the index and the output so far of each prompt that gained a
                token; the last call has `finished` set.

        RequestError naming the prompt if one can never be served; then none is started. Ctrl-C, or an error in
        `on_output`, aborts all of this call and leaves the engine as it was.
        """
        batch = self._batch(prompts, sampling_params)
        inbox: deque[RequestOutput] = deque()
        with self._submitted(batch, inbox, at_end=on_output is None) as names:
            counters = self.engine.scheduler.counters
            index = {name: i for i, name in enumerate(names)}
            results = [_empty(name, job) for name, job in zip(names, batch, strict=True)]
            unfinished = len(results)
            with Progress(len(batch), enabled=use_tqdm) as progress:
                while unfinished and self.engine.has_work:  # `on_output` may abort requests of its call
                    before = counters.generation_tokens
                    self._step()
                    progress.note(counters.generation_tokens - before)
                    while inbox:
                        more = inbox.popleft()
                        result = results[index[more.request_id]]
                        result.merge(more)
                        progress.end(int(more.finished))
                        unfinished -= more.finished
                        if on_output is not None:
                            on_output(index[more.request_id], result)
        return results

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield what each step adds to one prompt's completion. Leaving the loop early aborts the request."""
        inbox: deque[RequestOutput] = deque()
        with self._submitted(self._batch(prompt, sampling_params), inbox):
            finished = False
            while not finished and self.engine.has_work:
                self._step()
                while inbox:
                    more = inbox.popleft()
                    finished = more.finished
                    yield more

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The model's next message in one conversation or in many. RequestError if it has no chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages are a list of objects with role and content, not {messages!r:.60}")
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(conversation, **(chat_template_kwargs or {})) for conversation in many]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> dict[str, Any]:
        """A conversation as a prompt: text by the model's template, and its ids.

        The template writes the special tokens itself, so the tokenizer must not add them again.
        """
        if not self.tokenizer.chat_template:
            raise RequestError(
                f"{self.name} has no chat template: use generate with plain text, or a chat model such as demo-chat"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except (TemplateError, TypeError) as error:  # also what a template makes of a value it does not expect
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RequestError(f"the chat template of {self.name} refuses the messages: {line:.300}") from error
        return {"prompt": text, "prompt_token_ids": self.tokenizer(text, add_special_tokens=False).input_ids}

    def lengths(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[tuple[int, int]]:
        """`(prompt, output)` tokens of each sequence, if every one runs to its limit: a workload for `static`.

        A request has `n` of them.
        """
        longest = self.engine.scheduler.max_model_len
        return [
            (len(job.ids), max(1, min(job.params.max_tokens or longest, longest - len(job.ids))))
            for job in self._batch(prompts, sampling_params)
            for _ in range(job.params.n)
        ]

    # -- memory ---------------------------------------------------------------------------------------------

    def usage(self) -> ArenaUsage:
        """The arena in bytes, now."""
        return self.engine.pool.usage(self.engine.scheduler.placement.idle)

    @property
    def graph_bytes(self) -> int:
        """What CUDA graphs take of the device beside the arena; 0 where there are none."""
        return self._backend.graph_bytes

    @contextlib.contextmanager
    def static(self, split: Mapping[str, int] | Sequence[tuple[int, int]]) -> Iterator[LLM]:
        """Meanwhile the same model and arena with walls.

        Args:
            split: bytes per group, or the `(prompt, output)` lengths of a workload that gets its `best_walls`.

        ConfigError if requests are still being served, before or at the end: their pages are lost, so the latter
        are aborted.
        """
        if self.engine.has_work:
            raise ConfigError("the memory cannot be changed while requests are served: finish or abort them first")
        if self.journal is not None:
            raise ConfigError("a --journal is the life of one pool, and static memory is another one: leave it out")
        arena_bytes, before = self.engine.pool.arena_bytes, self.engine.pool.walls
        if isinstance(split, Mapping):
            walls: Mapping[str, int] = split
        else:
            walls = capacity.best_walls(self.layout.groups, arena_bytes, split)
        self._rebuild(*self._pool(arena_bytes, walls))
        try:
            yield self
        finally:
            lost = len(self.engine.scheduler.requests)
            self._rebuild(*self._pool(arena_bytes, before))
        if lost:
            raise ConfigError(f"{lost} requests were aborted when their memory went: finish them inside the block")

    def certificate(self) -> str:
        """What the arena holds: groups, page bytes, ids, tables, and how many sequences fit together."""
        pool, longest = self.engine.pool, self.engine.scheduler.max_model_len
        most = self.config.memory.max_total_tokens
        kind = "unified" if pool.walls is None else "static"
        entries = sum(len(pool.table(name)) for name in pool.groups)
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{self.name}: {dtype} on {self.config.device.device}, up to {longest:,} tokens",
            f"{self._backend.described}; started in {self._laps}",
            f"{kind} arena of {pool.arena_bytes:,} bytes, {pool.null_bytes:,} of them null pages",
            *self.layout.describe().splitlines(),
        ]
        if pool.walls is not None:
            lines.append("walls: " + ", ".join(f"{name} {size:,} bytes" for name, size in pool.walls.items()))
        ids = ", ".join(f"{space.capacity:,} of {name}" for name, space in pool.spaces.items())
        lines.append(f"virtual page ids: {ids}; page tables of {4 * entries:,} bytes")
        for length in sorted({min(n, longest - 1) for n in (1024, 8192, longest - 1)}):
            lines.append(f"{capacity.concurrent(pool, length, most):,} sequences of {length:,} tokens fit together")
        total = capacity.total_tokens(pool, longest - 1, most)
        cap = "" if most is None else f" under --max-total-tokens {most:,}"
        if self.journal is not None:
            before = "" if self.journal.kept is None else f"; the one before is {self.journal.kept}"
            lines.append(f"journal {self.journal.path}, the newest {self.journal.ring_bytes:,} bytes{before}")
        lines.append(f"{total:,} tokens fit in sequences of up to {longest:,}{cap}")
        return "\n".join(lines)

    # -- inside ---------------------------------------------------------------------------------------------

    def _pool(self, arena_bytes: int, walls: Mapping[str, int] | None) -> tuple[Pool, int]:
        """The bookkeeping, and the longest sequence it is good for. ConfigError if that is none or too short."""
        try:
            kind = Pool if self.config.memory.check_memory == "off" else GuardedPool
            pool = kind(arena_bytes, self.layout.groups, walls=walls, journal=self.journal)
        except JournalError as error:
            raise ConfigError(f"--journal {error}") from error
        return pool, sizing.max_model_len(self.config, self.layout.max_model_len, pool)

    def _build_engine(self, pool: Pool, max_model_len: int) -> Engine:
        config = self.config
        engine = Engine(
            pool,
            self._backend.executor(pool, max_model_len),
            self.tokenizer,
            config.scheduler,
            max_model_len=max_model_len,
            vocab_size=self.layout.vocab_size,
            eos_token_ids=self.end_token_ids,
            max_cached_tokens=config.memory.max_total_tokens,
            prefix_caching=config.memory.enable_prefix_caching,
            page_size=config.memory.page_size,
            check_memory=config.memory.check_memory,
        )
        if self.journal is not None:
            engine.executor = Recorder(engine.executor, engine.scheduler.running, self.journal)
            weakref.finalize(engine, self.journal.close)  # with the process at the latest
        return engine

    def _rebuild(self, pool: Pool, max_model_len: int) -> None:
        self._end(list(self.engine.scheduler.requests))
        del self.engine  # its arena goes first: two might not fit beside each other
        self.engine = self._build_engine(pool, max_model_len)

    def _batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Job]:
        """What to queue for each prompt."""
        if not isinstance(prompts, Sequence | Mapping):
            raise RequestError(f"prompts are one prompt or a list of them, not {prompts!r:.60}")
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(many)
        elif isinstance(sampling_params, Sequence) and all(isinstance(p, SamplingParams) for p in sampling_params):
            params = list(sampling_params)
        else:
            raise ConfigError(f"sampling_params are one SamplingParams or a list of them, not {sampling_params!r:.60}")
        if len(params) != len(many):
            raise ConfigError(f"{len(params)} sampling_params for {len(many)} prompts: give one, or one for each")
        return [_Job(*self._tokenise(prompt), p, _salt(prompt)) for prompt, p in zip(many, params, strict=True)]

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer(prompt).input_ids
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
            if not isinstance(ids, Sequence) or isinstance(ids, str) or not isinstance(text, str | None):
                raise RequestError(
                    f"prompt_token_ids are a list of token ids, beside a text or nothing, not {prompt!r:.60}"
                )
            return text, list(ids)
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return self._tokenise(prompt["prompt"])
        raise RequestError(f'a prompt is text, {{"prompt": text}} or {{"prompt_token_ids": [...]}}, not {prompt!r:.60}')

    @contextlib.contextmanager
    def _submitted(
        self, batch: Sequence[_Job], inbox: deque[RequestOutput], *, at_end: bool = False
    ) -> Iterator[list[str]]:
        """All requests of a call, or none: queued on entry, whatever is left of them aborted on exit. `at_end`: see
        `Engine.add_request`."""
        names = [str(next(self._names)) for _ in batch]
        try:
            for i, (name, job) in enumerate(zip(names, batch, strict=True)):
                try:
                    with _whole_step():
                        self.engine.add_request(
                            name, job.ids, job.params, prompt=job.text, cache_salt=job.cache_salt, at_end=at_end
                        )
                except RequestError as error:
                    raise RequestError(f"prompt {i}: {error}" if len(batch) > 1 else str(error)) from None
                self._inboxes[name] = inbox
            yield names
        finally:
            try:
                self._end(names)
            except KeyboardInterrupt:  # a second one, maybe before it could be held back
                self._end(names)
                raise

    def _end(self, names: Sequence[str]) -> None:
        """Abort what is left of these requests. Nothing runs on the device when no request is left at all."""
        with _whole_step():
            for name in names:
                self.engine.abort(name)
                self._inboxes.pop(name, None)
            if not self.engine.scheduler.has_work:
                self.engine.drain()

    def _step(self) -> None:
        """One step for everyone; increments go to the inbox of the call that they belong to."""
        with _whole_step():
            for output in self.engine.step():
                self._inboxes[output.request_id].append(output)


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """A start that a device has too little memory for is the user's to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"the device has too little memory to start: {line} Free it, or lower --dtype, --max-num-batched-tokens, "
            "--max-num-seqs or --gpu-memory-utilization"
        ) from error


def _journal(config: EngineConfig) -> Journal | None:
    """The file is had before a model is loaded. ConfigError if it cannot be."""
    memory = config.memory
    if memory.journal is None:
        return None
    try:
        return Journal(
            memory.journal,
            memory.journal_bytes,
            about={"model": config.model.model, "device": config.device.device, "isthmus": __version__},
        )
    except JournalError as error:
        raise ConfigError(f"--journal {error}") from error


def _warn_of_idle(given: Collection[str], config: EngineConfig) -> None:
    """A line for each setting that somebody made and that does nothing here."""
    memory = config.memory
    if "gpu_memory_utilization" in given and config.device.device == "cpu":
        _log.warning("--gpu-memory-utilization is ignored on a cpu: --pool-bytes sizes the arena")
    if "gpu_memory_utilization" in given and config.device.device == "cuda" and memory.pool_bytes is not None:
        _log.warning("--gpu-memory-utilization is ignored with --pool-bytes, which sizes the arena")
    if config.device.enforce_eager and config.device.device == "cpu":
        _log.warning("--enforce-eager is ignored on a cpu, where nothing is compiled or captured")
    if "static_workload" in given and memory.memory == "unified":
        _log.warning("--static-workload is ignored with --memory unified")
    elif "static_workload" in given and memory.static_split is not None:
        _log.warning("--static-workload is ignored with --static-split, which says what it would find")


def _dtype(asked: str, stored: Any) -> torch.dtype:
    """The torch dtype of a `--dtype`; what the checkpoint says, or bfloat16 where it says nothing, for auto."""
    if asked != "auto":
        found = getattr(torch, asked)
    elif isinstance(stored, torch.dtype):
        found = stored
    else:
        found = torch.bfloat16
    assert isinstance(found, torch.dtype)
    return found


def _empty(name: str, job: _Job) -> RequestOutput:
    return RequestOutput(name, job.text, job.ids, [CompletionOutput(i) for i in range(job.params.n)])


def _salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if not isinstance(salt, str | None):
        raise RequestError(f"cache_salt is text, not {salt!r:.40}")
    return salt


@contextlib.contextmanager
def _whole_step() -> Iterator[None]:
    """Ctrl-C waits for the end of what the engine does: half a step, or half an abort, would leave pages on the device
    nobody knows where."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


__all__ = ["LLM", "CompletionOutput", "Message", "Prompt", "RequestOutput", "SamplingParams", "TokenLogprob"]
