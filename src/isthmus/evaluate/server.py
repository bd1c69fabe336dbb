"""A running server as the lm-evaluation-harness wants a model.

What is asked and how answers are read is the harness' own client's. The requests are sent here: the harness would send
the key of another service where there is none, log the one there is, and compute again what takes long.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from lm_eval.api.model import LM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tqdm import tqdm

from isthmus.endpoint import Endpoint, refusal
from isthmus.errors import ConfigError, IsthmusError, ModelError
from isthmus.model.source import resolve

_WAITS = (1.0, 4.0)  # seconds before each time that a request is sent again
_BUSY = (429, 500, 502, 503, 504)  # statuses that may be others a moment later
_SILENCE = aiohttp.ClientTimeout(total=None, sock_connect=15.0, sock_read=3600.0)
"""A server may queue a request for long and sends nothing before the whole answer. After an hour it counts as gone."""


def server_model(endpoint: Endpoint, name: str | None, tokenizer: str, concurrency: int, *, chat: bool) -> LM:
    """The model `name`, or the first that the server offers.

    Args:
        tokenizer: a model as `--model` names it; texts become tokens on this side.
        concurrency: requests under way.
        chat: the harness will ask by the chat template. ModelError if there is none.

    ConfigError for a server that is not there or does not tell its context.
    """
    offer = endpoint.offer(name)
    if offer.max_model_len is None:
        raise ConfigError(f"--url {endpoint.url}: its /v1/models does not tell max_model_len, which the harness needs")
    source = resolve(tokenizer, load_format="dummy")
    spells = source.load_tokenizer()
    if chat and not spells.chat_template:
        raise ModelError(f"{source.name} has no chat template: leave out --apply-chat-template")
    begins = spells("x").input_ids[:1] == [spells.bos_token_id]
    if chat and begins:  # a template that writes the token itself must not get another one
        text = spells.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        begins = not str(text).startswith(str(spells.bos_token))
    return _Client(
        endpoint,
        concurrency,
        model=offer.name,
        tokenizer=str(source.directory),
        max_length=offer.max_model_len,
        add_bos_token=begins,
    )


class _Client(LocalCompletionsAPI):  # type: ignore[misc]
    """The harness' client, with requests sent by us."""

    def __init__(self, endpoint: Endpoint, concurrency: int, **settings: Any) -> None:
        super().__init__(
            base_url=f"{endpoint.url}/v1/completions",
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            batch_size=1,
            num_concurrent=2,  # with more than one, all requests come to `get_batched_requests`
            **settings,
        )
        self._headers = endpoint.headers
        self._most = concurrency

    async def get_batched_requests(
        self,
        requests: Sequence[Any],
        cache_keys: Sequence[Any],
        *,
        generate: bool = True,
        ctxlens: Sequence[int | None] | None = None,
        gen_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[Any]]:
        """A list of one answer for each. The first error ends the others: IsthmusError."""
        limit = asyncio.Semaphore(self._most)

        async def one(session: aiohttp.ClientSession, tokens: Any, before: int | None) -> list[Any]:
            wanted = copy.deepcopy(gen_kwargs)  # the harness takes it apart
            message = self.create_message([tokens])
            body = self._create_payload(message, generate=generate, gen_kwargs=wanted, seed=self._seed)
            async with limit:
                data = await self._post(session, body)
            bar.update()
            return self._read(data, tokens, before, generate=generate)

        with tqdm(total=len(requests), desc="requests", unit="req", disable=None, leave=False) as bar:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._most), headers=self._headers, timeout=_SILENCE
            ) as session:
                try:
                    async with asyncio.TaskGroup() as group:
                        pairs = zip(requests, ctxlens or [None] * len(requests), strict=True)
                        tasks = [group.create_task(one(session, *pair)) for pair in pairs]
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _post(self, session: aiohttp.ClientSession, body: Any) -> bytes:
        """The answer to a request, sent again while nobody answers or the server is too busy."""
        for wait in (*_WAITS, None):
            try:
                async with session.post(self.base_url, json=body) as response:
                    data = await response.read()
                if response.ok:
                    return data
                error: IsthmusError = refusal(self.base_url, response.status, response.reason or "", data)
                if response.status not in _BUSY:
                    break
            except TimeoutError:
                error = IsthmusError(f"{self.base_url} has not answered for too long: is it still at work?")
                break  # it may be, and would have to begin again
            except aiohttp.ClientError as failure:
                error = IsthmusError(f"{self.base_url} does not answer: {failure or type(failure).__name__}")
            if wait is not None:
                await asyncio.sleep(wait)
        raise error from None

    def _read(self, data: bytes, tokens: Any, before: int | None, *, generate: bool) -> list[Any]:
        try:
            answer = json.loads(data)
            if generate:
                return [text or "" for text in self.parse_generations(outputs=answer)]
            return list(self.parse_logprobs(outputs=answer, tokens=[tokens], ctxlens=[before]))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            what = "" if generate else ", with log probabilities of the prompt (echo)"
            raise IsthmusError(f"{self.base_url}: its answer is not that of OpenAI's API{what}") from error
