"""Sampling parameters, with vLLM's names and defaults, and the error for requests that cannot be served."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.errors import ConfigError, IsthmusError

_MOST_BIAS = 1e30  # logits plus this are finite in float32, so that only a model can make them infinite


class RequestError(IsthmusError, ValueError):
    """A request that can never be served as asked. The engine is as it was."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and where it ends.

    Raises ConfigError naming the parameter when a value has the wrong type or is out of range.
    """

    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off (-1 is accepted and means the same)
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the context
    min_tokens: int = 0
    stop: Sequence[str] = ()  # one string is accepted too
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report besides the chosen token; 0 = the chosen one alone
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    skip_special_tokens: bool = True
    grammar: str | None = None  # for llguidance: the output follows it, and ends where it does

    def __post_init__(self) -> None:
        self._require_types()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        checks = (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "in [0.001, 1000]"),
            (
                "logit_bias",
                all(abs(x) <= _MOST_BIAS for x in self.logit_bias.values()),
                "numbers to 1e30 by token id",
            ),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "between 0 and max_tokens"),
            ("min_tokens", not (self.min_tokens and self.grammar), "0 with a grammar, which says where it ends"),
            ("ignore_eos", not (self.ignore_eos and self.grammar), "False with a grammar, which says where it ends"),
            ("stop", all(isinstance(s, str) and s for s in stop), "a string or a list of non-empty strings"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "0 or more"),
        )
        for name, ok, want in checks:
            self._require(name, ok, want)

    def _require_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            self._require(name, _is_int(getattr(self, name)), "a whole number")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._require(name, value is None or _is_int(value), "a whole number or None")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            self._require(name, _is_number(getattr(self, name)), "a number")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        bias, ids = self.logit_bias or {}, self.stop_token_ids or ()
        pairs = isinstance(bias, Mapping) and all(_is_int(token) and _is_number(bias[token]) for token in bias)
        self._require("logit_bias", pairs, "finite numbers by token id")
        items = isinstance(ids, Collection) and not isinstance(ids, str) and all(map(_is_int, ids))
        self._require("stop_token_ids", items, "a list of token ids")
        texts = isinstance(self.stop or (), Collection) and not isinstance(self.stop, bytes)
        self._require("stop", texts, "a string or a list of non-empty strings")
        self._require("grammar", self.grammar is None or isinstance(self.grammar, str), "a text or None")

    def _require(self, name: str, ok: bool, want: str) -> None:
        if not ok:
            raise ConfigError(f"{name} must be {want}, not {getattr(self, name)!r:.80}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63)
