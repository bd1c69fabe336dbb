"""Answers from an engine in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from isthmus.chat.turns import Message, Piece, TooLongError
from isthmus.errors import IsthmusError, ModelError
from isthmus.llm import LLM
from isthmus.params import SamplingParams


class EngineSpeaker:
    """A model with a chat template.

    Args:
        settings: as `LLM` takes them.
        params: of every answer.

    ModelError for a model without a template, and whatever `LLM` raises.
    """

    def __init__(self, settings: Mapping[str, Any], params: SamplingParams) -> None:
        self._llm = LLM(**settings)
        self._params = params
        if not self._llm.tokenizer.chat_template:
            raise ModelError(
                f"{self._llm.name} has no chat template: complete plain text with isthmus generate, or name a chat "
                "model such as demo-chat"
            )
        self._longest = self._llm.engine.scheduler.max_model_len
        self.greeting = f"{self._llm.name}, up to {self._longest:,} tokens"

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """See `Speaker`."""
        prompt = self._llm.render_chat(messages)
        count = len(prompt["prompt_token_ids"])
        if count >= self._longest:
            raise TooLongError(
                f"the conversation has {count:,} tokens with this message and max_model_len is {self._longest:,}, of "
                "which one is for the answer"
            )
        tokens = 0
        with closing(self._llm.stream(prompt, self._params)) as stream:  # type: ignore[type-var]
            for more in stream:
                [output] = more.outputs
                tokens += len(output.token_ids)
                if output.finish_reason == "abort":
                    raise IsthmusError(f"the answer ends early: {output.stop_reason}")
                yield Piece(output.text, count, more.num_cached_tokens, tokens, output.finish_reason)
