"""Logits to tokens, all rows of a step at once.

The order is vLLM's: logit_bias, min_tokens, penalties, grammar, then greedy rows take the maximum; temperature, min-p,
top-k, top-p, draw. Logprobs are of the raw logits, before any of it.

A draw inverts the cumulative distribution at one uniform number in two levels (blocks of `_BLOCK` tokens, then
inside one), and top-k, top-p and min-p are thresholds on the logits. So a row's token depends on its own logits
and its own number alone, never on which rows share the batch; a seeded number is a hash of (seed, position).
Tokens tied with the last one a threshold keeps are kept too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from isthmus.engine.step import Logprob, Sampled, SampleRow
from isthmus.params import SamplingParams

_BLOCK = 512  # tokens per block of the two-level search; also what makes row sums independent of the batch
_GREEDY = 1e-5  # temperatures below mean greedy: dividing by them overflows
_HEAD = 1024  # how many of the most likely tokens top-p looks at before it sorts the whole row


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that a sequence with this seed draws for its token at `position`."""
    digest = blake2b(b"%d:%d" % (seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def first_maximum(logits: Tensor) -> Tensor:
    """Index of the largest entry per row, the first of equals: [R, V] -> int64 [R]. FloatingPointError for NaN.

    In blocks, because a reduction to values is vectorised for every dtype where `argmax` is not (6 times in bf16).
    """
    width = logits.shape[1]
    whole = width // _BLOCK * _BLOCK
    parts = [logits[:, :whole].view(len(logits), -1, _BLOCK).amax(-1)] if whole else []
    if whole < width:
        parts.append(logits[:, whole:].amax(-1, keepdim=True))
    blocks = torch.cat(parts, 1)
    top = blocks.amax(-1, keepdim=True)
    if bool(top.isnan().any()):
        raise FloatingPointError("the model's logits are NaN")
    block = (blocks == top).to(torch.uint8).argmax(-1, keepdim=True)
    index = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    inside = logits.gather(1, index.clamp(max=width - 1))
    offset: Tensor = (inside == top).to(torch.uint8).argmax(-1, keepdim=True)
    return (block * _BLOCK + offset).squeeze(1)


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
        """logits `[len(samples), >= vocab_size]`, any float dtype, unchanged. FloatingPointError for NaN."""
        assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows of logits for {len(samples)} samples"
        if not samples:
            return []
        logits = logits[:, : self._vocab_size]
        special = [i for i, row in enumerate(samples) if not _is_greedy(row.params) or _is_edited(row)]
        if len(special) < len(samples):
            tokens = first_maximum(logits)
        else:
            tokens = torch.empty(len(samples), dtype=torch.int64, device=logits.device)
        if special:
            tokens[special] = self._special(logits[special].float(), [samples[i] for i in special])
        chosen: list[int] = tokens.tolist()
        if all(row.params.logprobs is None for row in samples):
            return [Sampled(token) for token in chosen]
        return _with_logprobs(logits, samples, chosen)

    def _special(self, logits: Tensor, samples: Sequence[SampleRow]) -> Tensor:
        """Rows that need more than the maximum: float32 `[S, V]`, changed in place -> int64 `[S]`."""
        for row, sample in zip(logits, samples, strict=True):
            if _is_edited(sample):
                self._edit(row, sample)
        tokens = first_maximum(logits)
        drawn = [i for i, sample in enumerate(samples) if not _is_greedy(sample.params)]
        if drawn:
            rows = [samples[i] for i in drawn]
            numbers = [self._random.random() if r.seed is None else uniform(r.seed, r.position) for r in rows]
            tokens[drawn] = draw(logits[drawn], [row.params for row in rows], numbers)
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


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """One token per row at the uniform numbers given: float32 `[S, V]`, overwritten -> int64 `[S]`."""
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    logits -= logits.amax(-1, keepdim=True)  # the maximum is 0 from here on, so min-p is a plain threshold
    logits /= column([p.temperature for p in params])
    weights = logits.exp()
    floor = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
    floor = torch.maximum(floor, _top_k_floor(logits, [p.top_k for p in params]))
    if not bool(floor.isneginf().all()):
        weights.masked_fill_(logits < floor, 0.0)
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1]
    if nucleus:
        limit = _top_p_floor(logits[nucleus], weights[nucleus], [params[i].top_p for i in nucleus])
        weights[nucleus] = weights[nucleus].masked_fill_(logits[nucleus] < limit, 0.0)
    return _invert(weights, torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1))


def _top_k_floor(logits: Tensor, k: Sequence[int]) -> Tensor:
    """The k-th largest logit of each row, -inf where k is 0 (off) or all: `[S, 1]`."""
    width = logits.shape[1]
    floor = logits.new_full((len(k), 1), -math.inf)
    rows = [i for i, n in enumerate(k) if 0 < n < width]
    if rows:
        last = torch.tensor([[k[i] - 1] for i in rows], device=logits.device)
        floor[rows] = logits[rows].topk(max(k[i] for i in rows)).values.gather(1, last)
    return floor


def _top_p_floor(logits: Tensor, weights: Tensor, p: Sequence[float]) -> Tensor:
    """The smallest logit of the smallest set that holds a share p of the weights: `[S, 1]`.

    Looks at the head of the distribution first; a row that is flatter than that is sorted whole.
    """
    total = _block_sums(weights).sum(-1, keepdim=True)
    share = torch.tensor(p, dtype=torch.float64, device=logits.device).unsqueeze(1)
    width = logits.shape[1]
    # Sorted weights would do but for equal ones far out, where exp() rounds different logits together.
    head = logits.masked_fill(weights == 0, -math.inf).topk(min(_HEAD, width)).values
    floor, reached = _cut(head, total, share)
    flat = (~reached).squeeze(1).nonzero().squeeze(1)
    if len(flat) and width > _HEAD:
        ranked = logits[flat].masked_fill_(weights[flat] == 0, -math.inf).sort(descending=True).values
        floor[flat] = _cut(ranked, total[flat], share[flat])[0]
    return floor


def _cut(ranked: Tensor, total: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The last logit kept of each row ranked best first, and whether the share was reached or the row exhausted."""
    mass = ranked.double().exp().cumsum(-1) / total
    exhausted = ranked[:, -1:].isneginf()
    last = (mass < share).sum(-1, keepdim=True).clamp(max=ranked.shape[1] - 1)
    return ranked.gather(1, last), (mass[:, -1:] >= share) | exhausted


def _block_sums(weights: Tensor) -> Tensor:
    """float64 `[S, blocks]`: a block's sum depends on the block alone, whatever the batch."""
    short = -weights.shape[1] % _BLOCK
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    return weights.view(len(weights), -1, _BLOCK).sum(-1).double()


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token at which the cumulative weight passes `number * total`; never one of weight 0."""
    cumulative = _block_sums(weights).cumsum(-1)
    target = numbers * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    index = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, index.clamp(max=weights.shape[1] - 1)).double()
    inside.masked_fill_(index >= weights.shape[1], 0.0)
    return (block * _BLOCK + _first_above(inside.cumsum(-1), target - before)).squeeze(1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index with cumulative > target; where rounding leaves none, the last index that adds weight."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY


def _is_edited(sample: SampleRow) -> bool:
    params = sample.params
    return bool(
        not sample.allow_eos
        or sample.mask is not None
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _with_logprobs(logits: Tensor, samples: Sequence[SampleRow], chosen: Sequence[int]) -> list[Sampled]:
    results = [Sampled(token) for token in chosen]
    rows = [i for i, row in enumerate(samples) if row.params.logprobs is not None]
    wanted = [samples[i].params.logprobs or 0 for i in rows]
    for i, scored in zip(rows, score(logits[rows], [chosen[i] for i in rows], wanted), strict=True):
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
