"""`/v1/completions`: prompts in, their continuations out, whole or as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from isthmus.errors import ConfigError
from isthmus.server.answer import Identity, ending, receipts, usage
from isthmus.server.call import Call, Job, collect
from isthmus.server.errors import ApiError, bad_request
from isthmus.server.logprobs import CompletionLogprobs
from isthmus.server.protocol import CompletionRequest
from isthmus.server.reply import event, to_json
from isthmus.server.speller import Speller
from isthmus.server.wire import ModelInfo, Piece

KIND = "text_completion"


async def jobs(request: CompletionRequest, speller: Speller) -> list[Job]:
    """The prompts as token ids, each with how it is sampled. ApiError 400 for what can never be served."""
    prompts = request.prompts()
    if not prompts:
        raise bad_request("prompt: give at least one", "prompt")
    wants_prompt = bool(request.echo) and request.logprobs is not None
    try:
        params = request.sampling(
            max_tokens=max(1, 16 if request.max_tokens is None else request.max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if wants_prompt else None,
        )
    except ConfigError as error:
        raise invalid(error) from None
    encoded = await speller.aside(lambda: [_encode(speller, prompt) for prompt in prompts])
    return [checked_job(Job(ids, params, request.cache_salt), speller.info, "prompt") for ids in encoded]


def _encode(speller: Speller, prompt: str | list[int]) -> list[int]:
    return speller.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt


def invalid(error: ConfigError) -> ApiError:
    """What SamplingParams refuses: its message begins with the parameter's name."""
    return bad_request(str(error), str(error).split()[0].rstrip(":"))


def checked_job(job: Job, info: ModelInfo, param: str) -> Job:
    """The same. ApiError 400 if the prompt is empty, too long, or has ids that do not exist."""
    ids, vocabulary, longest = job.prompt_token_ids, info.vocab_size, info.max_model_len
    if not ids:
        raise bad_request(f"{param}: the prompt is empty: give at least one token", param)
    if max(ids) >= vocabulary:
        raise bad_request(f"{param}: token id {max(ids)} is outside the vocabulary (0 to {vocabulary - 1:,})", param)
    if len(ids) >= longest:
        raise bad_request(
            f"{param}: the prompt has {len(ids):,} tokens and the longest sequence is {longest:,}, of which one is for "
            "the output: shorten it",
            param,
            "context_length_exceeded",
        )
    for name, tokens in (("logit_bias", job.params.logit_bias), ("stop_token_ids", job.params.stop_token_ids)):
        if tokens and max(tokens) >= vocabulary:
            raise bad_request(f"{name}: token id {max(tokens)} is outside the vocabulary", name)
    return job


class _Choice:
    """One continuation on its way out."""

    def __init__(self, request: CompletionRequest, call: Call, index: int, speller: Speller) -> None:
        self.index = index
        self._prompt = index // call.n
        self._request = request
        self._call = call
        self._speller = speller
        self._logprobs = None if request.logprobs is None else CompletionLogprobs(request.logprobs)
        self._is_new = True

    def advance(self, piece: Piece) -> dict[str, Any]:
        """The `choices` entry for what the engine added; the first one begins with an echo if that was asked for."""
        text, entries, more = piece.text, piece.logprobs or [], {}
        if self._request.max_tokens == 0:
            text, entries = "", []  # the engine made one token, because a prompt alone makes no step
        if self._is_new and self._request.echo:
            text = self._echo() + text
            if self._logprobs is not None:
                prompt = self._call.prompt_logprobs[self._prompt] or []
                first = self._speller.decode(self._call.jobs[self._prompt].prompt_token_ids[:1])
                more = {"logprobs": self._logprobs.add([*prompt, *entries], first)}
        elif self._logprobs is not None:
            more = {"logprobs": self._logprobs.add(entries)}
        self._is_new = False
        reason = "length" if self._request.max_tokens == 0 else piece.finish_reason
        return (
            {"index": self.index, "text": text, "logprobs": None, "finish_reason": reason}
            | more
            | {"stop_reason": piece.stop_reason}
        )

    def _echo(self) -> str:
        prompt = self._request.prompts()[self._prompt]
        return prompt if isinstance(prompt, str) else self._speller.decode(prompt)


async def stream(request: CompletionRequest, call: Call, identity: Identity, speller: Speller) -> AsyncIterator[bytes]:
    """Events: chunks of text per choice, usage if it was asked for, `[DONE]`."""
    choices: dict[int, _Choice] = {}
    tail = {"usage": None} if request.include_usage else {}
    async for pieces in call:
        events = []
        for piece in pieces:
            if piece.index not in choices:
                choices[piece.index] = _Choice(request, call, piece.index, speller)
            entry = choices[piece.index].advance(piece)
            if entry["text"] or entry["logprobs"] or entry["finish_reason"]:
                events.append(event(identity.envelope(KIND, [entry]) | tail))
        if events:
            yield b"".join(events)
    yield ending(KIND, call, identity, request, usage(call, _generated(request)))


async def whole(request: CompletionRequest, call: Call, identity: Identity, speller: Speller) -> AsyncIterator[bytes]:
    """The one body."""
    choices = [_Choice(request, call, piece.index, speller).advance(piece) for piece in await collect(call)]
    body = identity.envelope(KIND, choices) | {"usage": usage(call, _generated(request))}
    yield to_json(body | ({"isthmus": receipts(call)} if request.wants_receipt else {}))


def _generated(request: CompletionRequest) -> int | None:
    """Output tokens to account for where they are not those that the engine made."""
    return 0 if request.max_tokens == 0 else None
