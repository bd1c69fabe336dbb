"""Text to tokens and back in the front, with the engine's own tokenizer, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizers import Tokenizer

from isthmus.engine.detokenize import TextDecoder
from isthmus.errors import ConfigError
from isthmus.server.templates import ChatTemplate, read_template
from isthmus.server.wire import ModelInfo

T = TypeVar("T")


class Speller:
    """A model's tokenizer and chat template. ConfigError when `--chat-template` cannot be used."""

    def __init__(self, info: ModelInfo, template_file: str | None) -> None:
        self.info = info
        self._tokenizer: Any = Tokenizer.from_file(info.tokenizer_file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.decoder = TextDecoder(self._tokenizer)
        source = info.chat_template if template_file is None else read_template(template_file)
        self.template: ChatTemplate | None = None
        remedy = "serve it with --chat-template FILE"
        self.no_template = f"{info.name} has no chat template: use /v1/completions, or {remedy}"
        if source:
            try:
                self.template = ChatTemplate(source, info.special_tokens, template_file or info.name)
            except ConfigError as error:
                if template_file is not None:
                    raise
                self.no_template = f"{error}: {remedy}"
        self._thread = ThreadPoolExecutor(1, "spelling")

    async def aside(self, work: Callable[[], T]) -> T:
        """Run something that takes long for an event loop (tokenising, templates, grammars) in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. UnicodeEncodeError for half of a surrogate pair."""
        text.encode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return self.decoder.decode(token_ids)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
