"""Paged attention in plain torch operators: the CPU backend, and what every other kernel must equal.

A step is a flat batch of T tokens. A sequence's keys are `[cached rows, read from pages] + [this step's own
rows, straight from the activations]`: a prefill chunk never reads itself back, so a window group needs pages
only for the tokens a later step can see. Decodes (one token) run as padded batches of like length; a chunk runs
alone, in blocks of queries.

Bytes that are not a sequence's own (the rest of its boundary pages, the null page) may be NaN: scores there are
replaced, not added to, and value rows there are zeroed before they meet a weight of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.memory import Group

Int64 = NDArray[np.int64]

Lookup = Callable[[Int64, Int64], Int64]
"""(index of the sequence in the step, column of its block table), broadcast together -> physical pages."""

QUERY_BLOCK = 128
"""Most queries of a chunk scored at once (measured: 512 at once is half as fast)."""

BLOCK_SCORES = 1 << 20
"""Most scores per head of one block of queries: long contexts get smaller blocks, so memory stays flat."""

SLACK_TOKENS = 1024
"""Padding one bucket of decodes may carry before another bucket is cheaper (its fixed cost in read tokens)."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Buffer:
    """Memory that one gather after the other reuses: fresh megabytes cost as much in page faults as in copying."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, words: int, dtype: torch.dtype) -> Tensor:
        """`[rows, words]` of that dtype, uninitialised. What was taken before is overwritten."""
        nbytes = rows * words * dtype.itemsize
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[:nbytes].view(dtype).view(rows, words)


@dataclass(frozen=True)
class Scratch:
    """The buffers of one executor."""

    key: Buffer = field(default_factory=Buffer)
    value: Buffer = field(default_factory=Buffer)


@dataclass(frozen=True)
class PartView:
    """One part (a layer's K or V) of every page of the arena, in place.

    The elements are seen as integer words as wide as a row allows: copying words is up to three times as fast as
    copying bf16 elements, and no bit pattern is ever interpreted on the way.
    """

    words: Tensor  # [pages, page_size, words of a row], strides of the arena
    heads: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, arena: Tensor, group: Group, name: str) -> PartView:
        """The part `name` of `group` over `arena` (uint8 [bytes]). KeyError if the page has no such part."""
        part = group.spec.part(name)
        page_size, heads, dim = part.shape
        row_bytes = part.nbytes // page_size
        width = next(width for width in _WORDS if row_bytes % width == 0)
        pages = arena.numel() // group.spec.page_bytes
        flat = arena[: pages * group.spec.page_bytes].view(_WORDS[width])
        words = flat.as_strided(
            (pages, page_size, row_bytes // width),
            (group.spec.page_bytes // width, row_bytes // width, 1),
            part.offset // width,
        )
        return cls(words, heads, dim, getattr(torch, part.dtype))

    def read(self, pages: Tensor, buffer: Buffer, more: int = 0) -> Tensor:
        """A copy of those pages' rows in `buffer`, and `more` rows behind them for the caller to fill.

        Returns `[len(pages) * page_size + more, heads, dim]`, valid until the buffer is used again.
        """
        _, page_size, row_words = self.words.shape
        words = buffer.take(len(pages) * page_size + more, row_words, self.words.dtype)
        if len(pages):
            into = words[: len(pages) * page_size].view(len(pages), -1)
            torch.index_select(self.words.flatten(1), 0, pages, out=into)
        return words.view(self.dtype).view(-1, self.heads, self.dim)

    def write(self, pages: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """Put `rows` `[n, heads, dim]` at `[pages[i], offsets[i]]`."""
        words = rows.to(self.dtype).flatten(1).view(self.words.dtype)
        self.words.index_put_((pages, offsets), words)


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's rows lie."""

    key: PartView
    value: PartView | None  # None: values are the first elements of the keys (MLA)


@dataclass(frozen=True)
class Bucket:
    """Decodes of like length, padded to the longest: B sequences, L = page columns x page_size rows each."""

    tokens: Tensor  # int64 [B]: their tokens in the flat batch
    pages: Tensor  # int64 [B * columns], 0 where a sequence has fewer
    ages: Tensor  # int64 [B]: how many tokens before the sequence's token its first row lies
    hidden: Tensor | None  # bool [B, 1, 1, L]: rows that are not visible to the sequence's token
    foreign: Tensor | None  # int64: the same rows, as indices into [B * L]


@dataclass(frozen=True)
class Block:
    """Some queries of a chunk and the keys that at least one of them sees."""

    queries: slice  # of the chunk's tokens
    keys: slice  # of [cached rows, own rows]
    causal: Tensor  # bool [queries, queries], over the last keys: hidden because later
    passed: Tensor | None  # bool [queries, n], over the first n keys: hidden because the window has passed


@dataclass(frozen=True)
class Chunk:
    """A sequence with more than one token in the step."""

    tokens: slice  # of the flat batch
    pages: Tensor  # int64 [columns] that hold the cached rows it sees
    cached: slice  # of those pages' rows: the ones it sees
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class GroupBatch:
    """What the layers of one group need to know about a step."""

    written: Tensor | None  # int64: tokens that have a page to be written to; None: all of them
    write_pages: Tensor  # int64 [written]
    write_offsets: Tensor  # int64 [written]
    buckets: tuple[Bucket, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Sight:
    """What the queries of a group's layers see: everything before them, a window, or what came since the last multiple
    of it (`chunked`)."""

    window: int | None
    chunked: bool = False

    def first(self, position: Int64) -> Int64:
        """The first position that a query sees."""
        if self.window is None:
            return np.zeros_like(position)
        return position // self.window * self.window if self.chunked else np.maximum(position - self.window + 1, 0)


def group_batch(group: Group, query_start: Int64, past: Int64, lookup: Lookup, *, chunked: bool = False) -> GroupBatch:
    """Turn a step into index tensors for one group; `chunked`: its window is a chunk (`Sight`).

    query_start `[S + 1]` and past `[S]` as in `Step`. Raises IndexError naming the group if a token that must be
    read has no page; a sequence's last token always has one. Other tokens of a chunk may have none, if no later
    query can see them, and are not written then.
    """
    page_size, sight = group.spec.page_size, Sight(group.window, chunked)
    counts = np.diff(query_start)
    sequence = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - past, counts)
    pages = lookup(sequence, position // page_size)
    written = np.flatnonzero(pages)
    every = len(written) == len(pages)
    decodes = list(_split(page_size, sight, np.flatnonzero(counts == 1), past))
    chunks = np.flatnonzero(counts > 1)
    return GroupBatch(
        None if every else torch.from_numpy(written),
        torch.from_numpy(pages if every else pages[written]),
        torch.from_numpy((position if every else position[written]) % page_size),
        tuple(_bucket(group, sight, some, query_start, past, lookup) for some in decodes),
        tuple(_chunk(group, sight, int(s), query_start, past, lookup) for s in chunks),
    )


def _bound(group: Group, pages: Int64) -> Tensor:
    if not pages.all():
        raise IndexError(f"group {group.name!r}: the step reads a token that has no page here (physical page 0)")
    return torch.from_numpy(pages)


def _split(page_size: int, sight: Sight, decodes: Int64, past: Int64) -> Iterator[Int64]:
    """Sort decodes by the pages they read and cut where padding would cost more than another bucket."""
    position = past[decodes]
    columns = position // page_size - sight.first(position) // page_size + 1
    order = np.argsort(-columns, kind="stable")
    start, padding, read = 0, 0, 0
    for i, n in enumerate(columns[order].tolist()):
        widest = int(columns[order[start]])
        padding, read = padding + (widest - n) * page_size, read + n * page_size
        if padding > max(SLACK_TOKENS, read // 4):
            yield decodes[order[start:i]]
            start, padding, read = i, 0, n * page_size
    if start < len(order):
        yield decodes[order[start:]]


def _bucket(group: Group, sight: Sight, members: Int64, query_start: Int64, past: Int64, lookup: Lookup) -> Bucket:
    page_size = group.spec.page_size
    position = past[members][:, None]
    visible = sight.first(position)
    first, last = visible // page_size, position // page_size
    column = first + np.arange(int((last - first).max()) + 1)
    inside = column <= last
    pages = np.zeros(column.shape, np.int64)
    pages[inside] = _bound(group, lookup(members[:, None], np.minimum(column, last))[inside]).numpy()
    row = first * page_size + np.arange(column.shape[1] * page_size)
    hidden = (row < visible) | (row > position)
    foreign = np.flatnonzero(hidden)
    some = len(foreign) > 0
    return Bucket(
        torch.from_numpy(query_start[members]),
        torch.from_numpy(pages.ravel()),
        torch.from_numpy((position - first * page_size)[:, 0]),
        torch.from_numpy(hidden)[:, None, None] if some else None,
        torch.from_numpy(foreign) if some else None,
    )


def _chunk(group: Group, sight: Sight, s: int, query_start: Int64, past: Int64, lookup: Lookup) -> Chunk:
    page_size, start = group.spec.page_size, int(past[s])
    low = int(sight.first(past[s : s + 1])[0])
    first = low // page_size
    column = np.arange(first, -(-start // page_size) if low < start else first)
    skip = low - first * page_size if len(column) else 0
    return Chunk(
        slice(int(query_start[s]), int(query_start[s + 1])),
        _bound(group, lookup(np.full(len(column), s), column)),
        slice(skip, skip + start - low),
        tuple(_blocks(int(query_start[s + 1] - query_start[s]), start - low, start, sight)),
    )


def _blocks(queries: int, cached: int, past: int, sight: Sight) -> Iterator[Block]:
    """Blocks of the chunk's queries, over `cached` rows and its own; its first token is at position `past`."""
    size, i = max(16, min(QUERY_BLOCK, BLOCK_SCORES // (cached + queries))), 0
    while i < queries:
        n = min(size, queries - i)
        inside = (past + i) % sight.window if sight.window is not None and sight.chunked else 0
        if sight.chunked:
            assert sight.window is not None
            n = min(n, sight.window - inside)  # all of a block see from the same key on
        end = cached + i + n
        # Query i + r sees keys (cached + i + r - window, cached + i + r].
        begin, passed = 0, None
        if sight.chunked:
            begin = cached + i - inside
        elif sight.window is not None:
            begin = max(0, cached + i - sight.window + 1)
            if end - 1 - sight.window >= begin:
                width = end - sight.window - begin
                passed = torch.ones(n, width, dtype=torch.bool).tril(cached + i - sight.window - begin)
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        yield Block(slice(i, i + n), slice(begin, end), causal, passed)
        i += n


@dataclass(frozen=True)
class Scoring:
    """How a layer turns products into weights."""

    scaling: float
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap), before any mask
    sinks: Tensor | None = None  # [heads]: one more score per head, in the denominator only
    relative: Tensor | None = None  # [T, heads, distances]: added for the key so many tokens before; none farther

    def scores(self, products: Tensor) -> Tensor:
        """fp32 scores of q.k products, in place where they are fp32 already."""
        scores = products.float().mul_(self.scaling)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def of(self, tokens: Tensor | slice) -> Scoring:
        """Of some of the tokens."""
        return self if self.relative is None else replace(self, relative=self.relative[tokens])

    def add_relative(self, scores: Tensor, distance: Tensor) -> None:
        """Change scores `[tokens, heads, keys]`; distance int64 `[tokens, keys]`, where negative anything may come."""
        assert self.relative is not None
        most = self.relative.shape[-1]
        index = distance.clamp(0, most - 1)[:, None].expand(scores.shape)
        scores += self.relative.float().gather(-1, index).masked_fill_((distance >= most)[:, None], 0.0)

    def weights(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Softmax over the last dim of fp32 `[.., kv_heads, group, queries, keys]`."""
        weights = torch.softmax(scores, dim=-1)
        if self.sinks is not None:
            # exp(s) / (sum exp(s) + exp(sink)) = softmax(s) * sigmoid(logsumexp(s) - sink)
            sinks = self.sinks.float().view(scores.shape[-4], scores.shape[-3], 1, 1)
            weights.mul_(torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - sinks))
        return weights.to(dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    batch: GroupBatch,
    how: Scoring,
    scratch: Scratch,
    *,
    write: bool,
) -> Tensor:
    """Attention of one layer over a step; returns `[T, heads, v_dim]`.

    query `[T, heads, k_dim]`; key `[T, kv_heads, k_dim]` and value `[T, kv_heads, v_dim]` are the step's own rows.
    `write` puts them into the layer's pages first; a layer that reads another's pages passes False and the rows
    its owner wrote earlier in the same step.
    """
    if write and len(batch.write_pages):
        for part, own in ((cache.key, key), (cache.value, value)):
            if part is None:
                continue
            rows = own if batch.written is None else own.index_select(0, batch.written)
            part.write(batch.write_pages, batch.write_offsets, rows)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    for bucket in batch.buckets:
        queries = query.index_select(0, bucket.tokens)
        rows = _decode(queries, cache, value.shape[2], bucket, how.of(bucket.tokens), scratch)
        out.index_copy_(0, bucket.tokens, rows)
    for chunk in batch.chunks:
        keys = _rows(cache.key, chunk, key[chunk.tokens], scratch.key)
        if cache.value is None:
            values = keys[..., : value.shape[2]]
        else:
            values = _rows(cache.value, chunk, value[chunk.tokens], scratch.value)
        for block in chunk.blocks:
            queries, mine = query[chunk.tokens][block.queries], how.of(chunk.tokens).of(block.queries)
            out[chunk.tokens][block.queries] = _score_block(queries, keys[block.keys], values[block.keys], block, mine)
    return out


def _rows(part: PartView, chunk: Chunk, own: Tensor, buffer: Buffer) -> Tensor:
    """Cached rows then own rows of a chunk, `[keys, kv_heads, dim]`.

    Own rows are rounded to the cache's dtype too, so how a prompt is cut into chunks changes nothing.
    """
    rows = part.read(chunk.pages, buffer, len(own))
    end = chunk.cached.stop + len(own)
    rows[chunk.cached.stop : end].copy_(own)  # over the foreign rows of the last page
    return rows[chunk.cached.start : end].to(own.dtype)


def _decode(query: Tensor, cache: LayerCache, v_dim: int, bucket: Bucket, how: Scoring, scratch: Scratch) -> Tensor:
    """`[B, heads, k_dim]` -> `[B, heads, v_dim]`; the tokens' own rows are in their pages already."""
    count, heads, _ = query.shape
    kv_heads = cache.key.heads
    keys = cache.key.read(bucket.pages, scratch.key).to(query.dtype)
    # fp8 has no `index_fill_`
    values = keys if cache.value is None else cache.value.read(bucket.pages, scratch.value).to(query.dtype)
    if bucket.foreign is not None:
        values.index_fill_(0, bucket.foreign, 0)
    keys = keys.view(count, -1, kv_heads, cache.key.dim)
    values = values.view(count, -1, kv_heads, values.shape[-1])[..., :v_dim]
    grouped = query.view(count, kv_heads, heads // kv_heads, -1)
    # One product per head: heads interleave in a row, and a four-dimensional product would copy all of it.
    products = [torch.bmm(grouped[:, h], keys[:, :, h].transpose(1, 2)) for h in range(kv_heads)]
    scores = how.scores(torch.stack(products, 1)).unsqueeze(3)
    if how.relative is not None:
        how.add_relative(scores.view(count, heads, -1), bucket.ages[:, None] - torch.arange(scores.shape[-1]))
    if bucket.hidden is not None:
        scores.masked_fill_(bucket.hidden.unsqueeze(1), float("-inf"))
    weights = how.weights(scores, query.dtype).squeeze(3)
    out = [torch.bmm(weights[:, h], values[:, :, h]) for h in range(kv_heads)]
    return torch.stack(out, 1).view(count, heads, -1)


def _score_block(query: Tensor, keys: Tensor, values: Tensor, block: Block, how: Scoring) -> Tensor:
    """`[n, heads, k_dim]` over `[keys, kv_heads, dim]` -> `[n, heads, v_dim]`."""
    n, heads, k_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.transpose(0, 1).reshape(kv_heads, -1, k_dim)
    products = torch.bmm(grouped, keys.permute(1, 2, 0))
    scores = how.scores(products).view(kv_heads, heads // kv_heads, n, -1)
    if how.relative is not None:
        keys_before = torch.arange(n)[:, None] + keys.shape[0] - n - torch.arange(keys.shape[0])
        how.add_relative(scores.view(heads, n, -1).transpose(0, 1), keys_before)
    scores[..., -n:].masked_fill_(block.causal, float("-inf"))
    if block.passed is not None:
        scores[..., : block.passed.shape[1]].masked_fill_(block.passed, float("-inf"))
    weights = how.weights(scores, query.dtype).view(kv_heads, -1, keys.shape[0])
    return torch.bmm(weights, values.transpose(0, 1)).view(heads, n, -1).transpose(0, 1)
