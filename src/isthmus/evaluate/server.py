"""A running server as the lm-evaluation-harness wants a model: by the harness' own client."""

from __future__ import annotations

from typing import Any

import aiohttp
from lm_eval.api.model import LM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from isthmus.endpoint import Endpoint
from isthmus.errors import ConfigError, IsthmusError, ModelError
from isthmus.model.source import resolve


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
        base_url=f"{endpoint.url}/v1/completions",
        model=offer.name,
        header=endpoint.headers or None,
        tokenizer=str(source.directory),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        num_concurrent=concurrency,
        batch_size=1,
        max_length=offer.max_model_len,
        add_bos_token=begins,
    )


class _Client(LocalCompletionsAPI):  # type: ignore[misc]
    """The harness' client, whose last word is one line."""

    async def get_batched_requests(self, *args: Any, **kwargs: Any) -> Any:
        """IsthmusError when it gives up."""
        try:
            return await super().get_batched_requests(*args, **kwargs)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise IsthmusError(f"{self.base_url} does not answer: {error or type(error).__name__}") from error
