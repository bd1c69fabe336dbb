"""One token per row of logits, greedy or drawn.

A draw inverts the cumulative distribution at one uniform number, in token order. Top-k, top-p and min-p are
thresholds on the logits, so tokens tied with the last one that a threshold keeps are kept too.

Nothing here sorts a vocabulary. The maxima of blocks of tokens are found in one pass over the logits as they are.
The k largest blocks hold the k largest tokens, and a block whose maximum is below a threshold holds none that it
keeps: where thresholds leave few blocks, only those are looked at (*narrow* rows). What share top-p keeps is found
by radix selection, on the weights of a few large blocks if they hold the share, else on the whole row.

A row's token depends on its own logits and its own number alone, never on which rows share the batch: what a batch
adds to a row is only entries of weight 0, and sums are over blocks or sequential.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.params import SamplingParams

NO_TOKEN = -1  # of a row whose logits have no finite maximum

_BLOCK = 128  # tokens whose maximum and sum are taken together
_HEAD = 64  # how many of the largest blocks top-p looks at before the whole row
_NARROW = 4  # a row is narrow if at most this part of its blocks is looked at
_CACHED = 1 << 18  # float32 numbers of one intermediate that stay near a CPU core
_LARGE = 1 << 26  # the same for other devices, which gain by size


def first_maximum(logits: Tensor) -> Tensor:
    """Index of the largest entry per row, the first of equals: [R, V] -> int64 [R].

    NO_TOKEN where the maximum is NaN or infinite. In blocks, because a reduction to values is vectorised for every
    dtype where `argmax` is not (6 times in bf16).
    """
    maxima = _block_maxima(logits)
    top = maxima.amax(-1, keepdim=True)
    block = (maxima == top).to(torch.uint8).argmax(-1, keepdim=True)
    index = _tokens(block)
    inside = logits.gather(1, index.clamp(max=logits.shape[1] - 1))
    offset = (inside == top).to(torch.uint8).argmax(-1, keepdim=True)
    return (block * _BLOCK + offset).masked_fill_(~top.isfinite(), NO_TOKEN).squeeze(1)


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """One token per row at the uniform numbers given: [R, V] of any float dtype, unchanged -> int64 [R].

    NO_TOKEN where the maximum is NaN or infinite.
    """
    rows = _Rows.of(logits, params, numbers)
    blocks = (rows.maxima >= rows.floor).sum(-1, keepdim=True)  # that hold a token which its thresholds keep
    narrow = blocks * _NARROW <= rows.maxima.shape[1]
    alive = rows.top.isfinite()
    tokens = torch.full((len(params), 1), NO_TOKEN, dtype=torch.int64, device=logits.device)
    for nucleus in (False, True):
        mine = alive & ((rows.share < 1) == nucleus)
        for part in rows.parts(mine & narrow, blocks):
            tokens[part] = _draw_narrow(rows.select(part), int(blocks[part].max()), nucleus=nucleus)
        for part in rows.parts(mine & ~narrow, rows.maxima.shape[1]):
            tokens[part] = _draw_nucleus(rows.select(part)) if nucleus else _draw_wide(rows.select(part))
    return tokens.squeeze(1)


@dataclass(frozen=True)
class _Rows:
    """Rows to draw from; `index` says which of `logits`, the other fields have one entry for each of them."""

    logits: Tensor  # [R, V], all rows of the call
    index: Tensor  # int64 [S]
    maxima: Tensor  # [S, blocks] of the logits
    top: Tensor  # float32 [S, 1], the largest logit
    floor: Tensor  # float32 [S, 1]: top-k and min-p keep logits from here on; -inf: all of them
    temperature: Tensor  # float32 [S, 1]
    share: Tensor  # float64 [S, 1], top-p
    numbers: Tensor  # float64 [S, 1]

    @classmethod
    def of(cls, logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> _Rows:
        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

        maxima = _block_maxima(logits)
        top = maxima.amax(-1, keepdim=True).float()
        temperature = column([p.temperature for p in params])
        floor = top + temperature * column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
        floor = torch.maximum(floor, _top_k_floor(logits, maxima, [p.top_k for p in params]))
        index = torch.arange(len(params), device=logits.device)
        share, uniform = column([p.top_p for p in params], torch.float64), column(numbers, torch.float64)
        return cls(logits, index, maxima, top, floor, temperature, share, uniform)

    def select(self, part: Tensor) -> _Rows:
        """Some of the rows, by their place among these."""
        columns = (self.maxima, self.top, self.floor, self.temperature, self.share, self.numbers)
        return _Rows(self.logits, self.index[part], *(values[part] for values in columns))

    def parts(self, mine: Tensor, blocks: Tensor | int) -> Iterator[Tensor]:
        """The rows of a mask `[S, 1]`, so many at a time that so many blocks of each are looked at together."""
        part = mine.squeeze(1).nonzero().squeeze(1)
        if len(part):
            most = int(blocks[part].max()) if isinstance(blocks, Tensor) else blocks
            yield from torch.split(part, _at_once(self.logits, most))

    def scaled(self, values: Tensor) -> Tensor:
        """Logits `[S, N]`, float32, overwritten: over the temperature, the row's largest at 0; -inf below the floor."""
        if not bool(self.floor.isneginf().all()):
            values.masked_fill_(values < self.floor, -math.inf)
        return values.sub_(self.top).div_(self.temperature)

    def whole(self) -> Tensor:
        """`scaled`, of all tokens."""
        return self.scaled(self.logits[self.index].to(torch.float32, copy=True))

    def blocks(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest blocks in token order, `[S, count * _BLOCK]`: float32 logits and token ids."""
        ids = _tokens(self.maxima.topk(count).indices.sort().values)
        return _gather(self.logits, self.index, ids), ids


def _draw_narrow(rows: _Rows, count: int, *, nucleus: bool) -> Tensor:
    """int64 `[S, 1]`, of rows whose thresholds leave at most `count` blocks."""
    values, ids = rows.blocks(count)
    scaled = rows.scaled(values)
    weights = scaled.exp()
    if nucleus:
        weights.mul_(scaled >= _floor_of_mass(scaled, weights, rows.share * _total(weights)))
    return ids.gather(1, _invert(weights, rows.numbers))


def _draw_wide(rows: _Rows) -> Tensor:
    """int64 `[S, 1]`, of rows without top-p whose every token counts."""
    return _invert(rows.whole().exp_(), rows.numbers)


def _draw_nucleus(rows: _Rows) -> Tensor:
    """int64 `[S, 1]`, of rows whose top-p is of nearly all tokens."""
    scaled = rows.whole()
    weights = scaled.exp()
    mass = rows.share * _total(weights)
    tokens, found = _draw_head(rows, mass)
    flat = (~found).squeeze(1).nonzero().squeeze(1)
    if len(flat):
        if len(flat) < len(tokens):
            rows, scaled, weights, mass = rows.select(flat), scaled[flat], weights[flat], mass[flat]
        weights.mul_(scaled >= _floor_of_mass(scaled, weights, mass))
        tokens[flat] = _invert(weights, rows.numbers)
    return tokens


def _draw_head(rows: _Rows, mass: Tensor) -> tuple[Tensor, Tensor]:
    """int64 `[S, 1]`, and where it holds: where the tokens above all but the largest blocks have the mass."""
    count = min(_HEAD, rows.maxima.shape[1])
    values, ids = rows.blocks(count)
    rest = rows.maxima.topk(count).values[:, -1:]  # nothing outside of these blocks is above this
    values.masked_fill_(values <= rest, -math.inf)
    scaled = rows.scaled(values)
    weights = scaled.exp()
    found = _total(weights) >= mass
    weights.mul_(scaled >= _floor_of_mass(scaled, weights, mass))
    return ids.gather(1, _invert(weights, rows.numbers)), found


def _top_k_floor(logits: Tensor, maxima: Tensor, k: Sequence[int]) -> Tensor:
    """The k-th largest logit of each row, -inf where k is 0 (off) or all: float32 `[R, 1]`."""
    width = logits.shape[1]
    floor = torch.full((len(k), 1), -math.inf, device=logits.device)
    rows = torch.tensor([i for i, n in enumerate(k) if 0 < n < width], dtype=torch.int64, device=logits.device)
    if not len(rows):
        return floor
    last = torch.tensor([min(n, width) for n in k], device=logits.device).unsqueeze(1) - 1
    most = int(last[rows].max()) + 1
    blocks = min(most, maxima.shape[1])
    for part in torch.split(rows, _at_once(logits, blocks)):
        values = _gather(logits, part, _tokens(maxima[part].topk(blocks).indices))
        floor[part] = values.topk(most).values.gather(1, last[part])
    return floor


def _floor_of_mass(scaled: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """The largest x such that the weights of entries >= x sum to `mass` `[S, 1]` at least: float32 `[S, 1]`.

    `scaled` `[S, N]` is 0 or less. Its bits without the sign grow as the number falls, so this is a radix selection
    on them, from the top digit down. Where rounding leaves the sum short, it is the least entry that has a weight.
    """
    keys, heavy = scaled.abs().view(torch.int32), weights.double()
    digits = keys >> 20
    sums = torch.zeros(len(keys), 1 << 11, dtype=torch.float64, device=keys.device)
    digit, left = _crossing(sums.scatter_add_(1, digits.long(), heavy), mass)
    found = digit
    row, entry = (digits == digit.int()).nonzero(as_tuple=True)
    keys, heavy = keys[row, entry], heavy[row, entry]
    for shift in (10, 0):
        digits = keys >> shift & 1023
        sums = torch.zeros(len(mass), 1 << 10, dtype=torch.float64, device=keys.device)
        sums.view(-1).scatter_add_(0, (row << 10) + digits, heavy)
        digit, left = _crossing(sums, left)
        found = found << 10 | digit
        inside = (digits == digit[row, 0]).nonzero().squeeze(1)
        row, keys, heavy = row[inside], keys[inside], heavy[inside]
    return -found.int().view(torch.float32)


def _crossing(sums: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The first bucket of `[S, buckets]` where the running sum reaches `mass`, and what of that the bucket must add."""
    cumulative = sums.cumsum(-1)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    bucket = torch.minimum(torch.searchsorted(cumulative, mass), last)
    return bucket, mass - torch.where(bucket > 0, cumulative.gather(1, (bucket - 1).clamp(min=0)), 0.0)


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The index at which the cumulative weight passes `number * total`, never one of weight 0: int64 `[S, 1]`."""
    cumulative = _block_sums(weights).cumsum(-1)
    target = numbers * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    index = _tokens(block)
    inside = weights.gather(1, index.clamp(max=weights.shape[1] - 1)).double()
    inside.masked_fill_(index >= weights.shape[1], 0.0)
    return block * _BLOCK + _first_above(inside.cumsum(-1), target - before)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index with cumulative > target; where rounding leaves none, the last index that adds weight."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _total(weights: Tensor) -> Tensor:
    """float64 `[S, 1]`. The running sum's last entry: sequential, so entries of weight 0 change nothing."""
    return _block_sums(weights).cumsum(-1)[:, -1:]


def _block_sums(weights: Tensor) -> Tensor:
    """float64 `[S, blocks]`: a block's sum depends on the block alone, whatever the batch."""
    short = -weights.shape[1] % _BLOCK
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    return weights.view(len(weights), -1, _BLOCK).sum(-1).double()


def _block_maxima(logits: Tensor) -> Tensor:
    """[R, V] -> [R, blocks], in the logits' dtype; NaN where a block has one."""
    width = logits.shape[1]
    whole = width // _BLOCK * _BLOCK
    parts = [torch.unflatten(logits[:, :whole], 1, (-1, _BLOCK)).amax(-1)] if whole else []
    if whole < width:
        parts.append(logits[:, whole:].amax(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _tokens(blocks: Tensor) -> Tensor:
    """Token ids of blocks: `[S, n]` -> `[S, n * _BLOCK]`; those of the last block may be past the vocabulary."""
    return (blocks.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=blocks.device)).flatten(1)


def _gather(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`logits[rows, ids]` for rows `[S]` and ids `[S, N]`, float32; -inf for ids past the vocabulary."""
    width = logits.shape[1]
    values = logits[rows.unsqueeze(1), ids.clamp(max=width - 1)].float()
    return values.masked_fill_(ids >= width, -math.inf) if width % _BLOCK else values


def _at_once(logits: Tensor, blocks: int) -> int:
    """How many rows to work on together when so many blocks of each are looked at."""
    return max(1, (_CACHED if logits.device.type == "cpu" else _LARGE) // (blocks * _BLOCK))
