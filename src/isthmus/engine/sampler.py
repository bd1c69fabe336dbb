"""Logits to tokens, all rows of a step at once.

The order is vLLM's: logit_bias, min_tokens, penalties, grammar, then greedy rows take the maximum; temperature, min-p,
top-k, top-p, draw. Logprobs are of the raw logits, before any of it. A seeded number is a hash of (seed, position).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from isthmus.engine.draw import NO_TOKEN, draw, first_maximum
from isthmus.engine.samples import GREEDY
from isthmus.engine.step import Logprob, Sampled, SampleRow
from isthmus.params import SamplingParams

_EDITED = 1 << 18  # float32 logits that are edited at a time, about what stays near a CPU core
NOT_FINITE = "the model's logits are not finite numbers (NaN or infinity): use --dtype bfloat16 or float32"


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that a sequence with this seed draws for its token at `position`."""
    digest = blake2b(b"%d:%d" % (seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Draws one token per row.

    Args:
        eos_token_ids: ids that end a sequence, masked while `min_tokens` holds it back.
        vocab_size: logits beyond it are padding of the head and are ignored.
    """

    def __init__(self, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._eos = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._random = random.Random()  # for rows without a seed

    def __call__(self, logits: Tensor, samples: Sequence[SampleRow]) -> list[Sampled]:
        """logits `[len(samples), >= vocab_size]`, any float dtype, unchanged.

        A row whose largest logit is NaN or infinite gets no token but a `problem`; the others get theirs.
        """
        assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows of logits for {len(samples)} samples"
        if not samples:
            return []
        logits = logits[:, : self._vocab_size]
        tokens = torch.empty(len(samples), dtype=torch.int64, device=logits.device)
        edited = [i for i, row in enumerate(samples) if is_edited(row)]
        plain = [i for i, row in enumerate(samples) if not is_edited(row)]
        if plain:
            tokens[plain] = self._choose(_rows(logits, plain), [samples[i] for i in plain])
        at_once = max(1, _EDITED // logits.shape[1])
        for start in range(0, len(edited), at_once):
            part = edited[start : start + at_once]
            tokens[part] = self._choose_edited(_rows(logits, part), [samples[i] for i in part])
        results = [Sampled(token) for token in tokens.tolist()]
        return _with_problems(_with_logprobs(logits, samples, results))

    def _choose_edited(self, logits: Tensor, samples: Sequence[SampleRow]) -> Tensor:
        """Rows whose logits change before the choice: `[S, V]` -> int64 `[S]`."""
        logits = logits.to(torch.float32, copy=True)
        for row, sample in zip(logits, samples, strict=True):
            self._edit(row, sample)
        return self._choose(logits, samples)

    def _choose(self, logits: Tensor, samples: Sequence[SampleRow]) -> Tensor:
        """The maximum, or a draw: `[S, V]` -> int64 `[S]`, NO_TOKEN for rows without a finite maximum."""
        tokens = torch.empty(len(samples), dtype=torch.int64, device=logits.device)
        greedy = [i for i, sample in enumerate(samples) if is_greedy(sample.params)]
        if greedy:
            tokens[greedy] = first_maximum(_rows(logits, greedy))
        drawn = [i for i, sample in enumerate(samples) if not is_greedy(sample.params)]
        if drawn:
            rows = [samples[i] for i in drawn]
            numbers = [self._random.random() if r.seed is None else uniform(r.seed, r.position) for r in rows]
            tokens[drawn] = draw(_rows(logits, drawn), [row.params for row in rows], numbers)
        return tokens

    def _edit(self, logits: Tensor, sample: SampleRow) -> None:
        """logit_bias, min_tokens, penalties and the grammar's mask on one row `[V]`, in place."""
        params = sample.params
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if not sample.allow_eos:
            ends = [token for token in (*self._eos, *params.stop_token_ids) if token < self._vocab_size]
            logits[ends] = -math.inf
        if params.repetition_penalty != 1.0:
            seen = torch.tensor([*{*sample.prompt, *sample.output}], dtype=torch.int64, device=logits.device)
            value = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(value > 0, value / penalty, value * penalty)
        if (params.presence_penalty or params.frequency_penalty) and sample.output:
            counts = Counter(sample.output)
            count = torch.tensor([*counts.values()], dtype=torch.float32, device=logits.device)
            logits[[*counts]] -= params.frequency_penalty * count + params.presence_penalty
        if sample.mask is not None:
            logits[torch.from_numpy(~sample.mask.allowed()).to(logits.device)] = -math.inf


def is_greedy(params: SamplingParams) -> bool:
    """The maximum is taken, not a draw."""
    return params.temperature < GREEDY


def is_edited(sample: SampleRow) -> bool:
    """Logits change before the choice."""
    params = sample.params
    return bool(
        not sample.allow_eos
        or sample.mask is not None
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, ascending; no copy if they are all of them."""
    return logits if len(rows) == len(logits) else logits[rows]


def _with_problems(results: Sequence[Sampled]) -> list[Sampled]:
    return [Sampled(NO_TOKEN, problem=NOT_FINITE) if r.token_id == NO_TOKEN else r for r in results]


def _with_logprobs(logits: Tensor, samples: Sequence[SampleRow], results: list[Sampled]) -> list[Sampled]:
    rows = [i for i, row in enumerate(samples) if row.params.logprobs is not None and results[i].token_id != NO_TOKEN]
    if rows:
        wanted = [samples[i].params.logprobs or 0 for i in rows]
        chosen = [results[i].token_id for i in rows]
        for i, scored in zip(rows, score(_rows(logits, rows), chosen, wanted), strict=True):
            results[i] = scored
    return results


def score(logits: Tensor, targets: Sequence[int], wanted: Sequence[int]) -> list[Sampled]:
    """Log probability and rank of one given token per row of `[R, V]`, and the `wanted[i]` most likely of each row."""
    raw = logits.float()
    norm = raw.logsumexp(-1, keepdim=True)
    value = raw.gather(1, torch.tensor(targets, dtype=torch.int64, device=raw.device).unsqueeze(1))
    ranks = ((raw > value).sum(-1) + 1).tolist()
    logprobs = (value - norm).squeeze(1).tolist()
    most = min(max(wanted, default=0), raw.shape[1])
    values, ids = raw.topk(most) if most else (raw[:, :0], torch.zeros(len(raw), 0, dtype=torch.int64))
    top_logprobs, top_ids = (values - norm).tolist(), ids.tolist()
    results = []
    for i, target in enumerate(targets):
        pairs = zip(top_ids[i][: wanted[i]], top_logprobs[i][: wanted[i]], strict=True)
        top = tuple(Logprob(token, logprob, rank) for rank, (token, logprob) in enumerate(pairs, 1))
        results.append(Sampled(target, logprobs[i], ranks[i], top))
    return results
