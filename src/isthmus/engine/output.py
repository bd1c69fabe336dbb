"""What a request gives back, named as in vLLM. `Engine.step` yields increments, `merge` adds them up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from isthmus.engine.receipt import Receipt
from isthmus.engine.sequence import FinishReason


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of a token at one position, before temperature and penalties."""

    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str  # its text alone; bytes of an unfinished character show as U+FFFD


PromptLogprobs: TypeAlias = list[dict[int, TokenLogprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` continuations, or what a step added to it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of all tokens so far, when logprobs were asked for
    logprobs: list[dict[int, TokenLogprob]] | None = None  # per token: the chosen one first, then the most likely
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string; None for the end token

    def merge(self, more: CompletionOutput) -> None:
        """Append what a later step added."""
        self.text += more.text
        self.token_ids += more.token_ids
        if more.logprobs is not None:
            self.logprobs = (self.logprobs or []) + more.logprobs
            self.cumulative_logprob = more.cumulative_logprob
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A request's continuations, or what a step added to some of them."""

    request_id: str
    prompt: str | None  # None when it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    receipt: Receipt | None = None  # what it cost and what it waited for, once finished
    num_cached_tokens: int = 0  # prompt tokens that were not computed again
    prompt_logprobs: PromptLogprobs | None = None
    """Per prompt token, when they were asked for, the token itself first; None for the first, which nothing predicts.
    As increments, they come with the first token."""

    def merge(self, more: RequestOutput) -> None:
        """Append what a later step added."""
        mine = {output.index: output for output in self.outputs}
        for output in more.outputs:
            mine[output.index].merge(output)
        self.finished, self.num_cached_tokens, self.receipt = more.finished, more.num_cached_tokens, more.receipt
        if more.prompt_logprobs is not None:
            self.prompt_logprobs = more.prompt_logprobs
