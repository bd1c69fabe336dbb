"""The sampler of a GPU: `isthmus.engine.sampler` in meaning, without a wait.

Tokens stay on the device, as the next step's inputs; what the host wants to know goes to pinned memory behind them
and is read later.

    host   parameters, numbers and edits of all rows -> one upload (none if all rows are greedy and unedited)
    device plain rows: survey, choose. Edited rows, some at a time: copy as float32, edit, survey, choose
    device -> host: tokens; scores of the rows that want log probabilities
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.engine.draw import NO_TOKEN
from isthmus.engine.edits import Edits
from isthmus.engine.packing import Packer
from isthmus.engine.sampler import NOT_FINITE, is_edited, is_greedy, uniform
from isthmus.engine.step import Logprob, Results, Sampled, SampleRow
from isthmus.kernels.logits import copy_rows, edit, score
from isthmus.kernels.sampling import GREEDY, choose, greedy

__all__ = ["DeviceSampler", "Drawn", "Scored", "greedy", "score_later"]

_EDITED_BYTES = 64 << 20  # of edited rows at a time
_PACKED_BYTES = 4 << 20  # of what is uploaded, but for very many edits
_UPLOADS = 2  # of a step at most
_SPARE = 256  # numbers in memory that is used again, at least
_HOTTEST = 1e30  # above it all tokens weigh the same, and the inverse stays a float32


class _Pinned:
    """Host memory that a device writes to, and the event of the copy that does."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.empty(size, dtype=dtype, pin_memory=on_gpu)
        self._first = size, self.host
        self.array: NDArray[Any] = self.host.numpy()
        self.event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def first(self, n: int) -> Tensor:
        """Its first numbers: mostly as many as the time before."""
        if self._first[0] != n:
            self._first = n, self.host[:n]
        return self._first[1]


class _Copy:
    """A device tensor on its way to pinned memory, behind what is queued on the current stream now.

    Memory is taken from `spare`, if there is any of its size, and is back there when the copy was waited for; all of it
    is of one dtype.
    """

    def __init__(self, tensor: Tensor, spare: list[_Pinned] | None = None) -> None:
        self._shape, self._spare = tensor.shape, spare
        flat = tensor if len(self._shape) == 1 else tensor.reshape(-1)
        self._count = n = self._shape.numel()
        pinned = spare.pop() if spare else None
        if pinned is None or len(pinned.array) < n:
            pinned = _Pinned(n if spare is None else max(n, _SPARE), tensor.dtype, tensor.device)
        pinned.first(n).copy_(flat, non_blocking=True)
        if pinned.event is not None:
            pinned.event.record(torch.cuda.current_stream(tensor.device))
        self._pinned: _Pinned | None = pinned

    def wait(self) -> NDArray[Any]:
        """Called once."""
        pinned, self._pinned = self._pinned, None
        assert pinned is not None
        if pinned.event is not None:
            pinned.event.synchronize()
        array = pinned.array[: self._count].reshape(self._shape)
        if self._spare is None:
            return array
        array = array.copy()
        self._spare.append(pinned)
        return array


class Scored:
    """Log probability and rank of one token per row, and the most likely tokens; made by `score_later`."""

    def __init__(self, scores: Tensor, wanted: Sequence[int]) -> None:
        self._copy = _Copy(scores)
        self._wanted = wanted

    def results(self) -> list[Sampled]:
        """One per row, in order; waits for the device."""
        words = self._copy.wait()
        most = (words.shape[1] - 4) // 2
        targets, ranks, ids = words[:, 0].tolist(), words[:, 1].tolist(), words[:, 4 : 4 + most].tolist()
        floats = words.view(np.float32)
        logprobs, others = floats[:, 2].tolist(), floats[:, 4 + most :].tolist()
        results = []
        for i, n in enumerate(self._wanted):
            pairs = zip(ids[i][:n], others[i][:n], strict=True)
            top = tuple(Logprob(token, logprob, rank) for rank, (token, logprob) in enumerate(pairs, 1))
            results.append(Sampled(targets[i], logprobs[i], ranks[i], top))
        return results


@dataclass(frozen=True)
class Drawn:
    """The tokens of a step."""

    tokens: Tensor  # int32 [>= R] on the device, NO_TOKEN where a row has no finite maximum
    _copy: _Copy
    _count: int  # R
    _scored: Scored | None = None
    _rows: Sequence[int] = ()  # that are scored

    def results(self) -> Results:
        """One per row, in order, as `isthmus.engine.sampler.Sampler` has them; waits for the device. Called once."""
        tokens, more = self._copy.wait()[: self._count], dict[int, Sampled]()
        for row, scored in zip(self._rows, self._scored.results() if self._scored else (), strict=True):
            more[row] = scored
        for row in (tokens == NO_TOKEN).nonzero()[0].tolist():
            more[row] = Sampled(NO_TOKEN, problem=NOT_FINITE)
        return Results(tokens, more)


def score_later(logits: Tensor, targets: Tensor | Sequence[int], wanted: Sequence[int]) -> Scored:
    """Queue `isthmus.engine.sampler.score` of `[R, V]`: a target per row, and the `wanted[i]` most likely of each.

    Targets are known to the host, or int32 on the device. Every column of the logits counts. IndexError for a target
    on the host that has no column.
    """
    rows = len(wanted)
    assert len(logits) == rows == len(targets), f"{len(logits)} rows of logits, {len(targets)} targets, {rows} wanted"
    packer = Packer(logits.device, 32 * rows, ring=1)
    return _score(packer, logits, logits.shape[1], range(rows), targets, wanted)


def _score(
    packer: Packer,
    logits: Tensor,
    vocab_size: int,
    rows: Sequence[int],
    targets: Tensor | Sequence[int],
    wanted: Sequence[int],
) -> Scored:
    """Of some rows, ascending; `targets` has one for each row of the logits."""
    most = min(max(wanted, default=0), vocab_size)
    if not rows:
        return Scored(torch.empty(0, 4 + 2 * most, dtype=torch.int32, device=logits.device), wanted)
    which = np.zeros((len(rows), 4), np.int32)
    which[:, 0] = rows
    sections: dict[str, NDArray[Any]] = {"which": which}
    if not isinstance(targets, Tensor):
        sections["targets"] = _tokens(targets, vocab_size)
    views = packer.upload(sections)
    on_device = targets if isinstance(targets, Tensor) else views["targets"]
    gathered = len(rows) < len(logits)
    return Scored(score(logits, vocab_size, views["which"], on_device, most, gathered=gathered), wanted)


def _tokens(targets: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    array = np.array(targets, np.int64)
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        raise IndexError(f"token {int(array[wrong][0])} is not in the vocabulary, 0..{vocab_size - 1}")
    return array.astype(np.int32)


class DeviceSampler:
    """Draws one token per row.

    Args:
        eos_token_ids: ids that end a sequence, masked while `min_tokens` holds it back.
        vocab_size: logits beyond it are padding of the head and are ignored.
        device: where the logits will be.
    """

    def __init__(self, eos_token_ids: Collection[int], vocab_size: int, device: torch.device | str) -> None:
        self._eos = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        # While one step waits to run, the next must not wait for its uploads.
        self._packer = Packer(device, _PACKED_BYTES, ring=2 * _UPLOADS)
        self._spare: list[_Pinned] = []  # for tokens
        self._random = random.Random()  # for rows without a seed

    def __call__(self, logits: Tensor, samples: Sequence[SampleRow]) -> Drawn:
        """Queue the choice of a token for each row; returns before it is made.

        Args:
            logits: `[len(samples), >= vocab_size]` on the device, float32, float16 or bfloat16, unchanged.

        IndexError for a token of a bias, prompt or output that the vocabulary does not have.
        """
        assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows of logits for {len(samples)} samples"
        edited = [i for i, sample in enumerate(samples) if is_edited(sample)]
        if edited or not all(is_greedy(sample.params) for sample in samples):
            tokens = self._choose(logits, samples, edited)
        else:
            tokens = greedy(logits, self._vocab_size)
        rows = [i for i, sample in enumerate(samples) if sample.params.logprobs is not None]
        if not rows:
            return self.chosen(tokens)
        wanted = [samples[i].params.logprobs or 0 for i in rows]
        scored = _score(self._packer, logits, self._vocab_size, rows, tokens, wanted)
        return Drawn(tokens, _Copy(tokens, self._spare), len(samples), scored, rows)

    def chosen(self, tokens: Tensor, count: int | None = None) -> Drawn:
        """Of tokens chosen already, int32, the first R = `count` (None: all): their buffer may be reused in stream
        order."""
        return Drawn(tokens, _Copy(tokens, self._spare), len(tokens) if count is None else count)

    def _choose(self, logits: Tensor, samples: Sequence[SampleRow], edited: Sequence[int]) -> Tensor:
        """int32 [R], of rows that are not all greedy and unedited."""
        vocab_size = self._vocab_size
        among = set(edited)
        order = [*(i for i in range(len(samples)) if i not in among), *edited]
        plain, at_once = len(order) - len(edited), max(1, _EDITED_BYTES // (4 * vocab_size))
        which, how = self._settings([samples[i] for i in order])
        which[:, 0] = order
        sections: dict[str, NDArray[Any]] = {"which": which, "how": how}
        changed = [samples[i] for i in edited]
        edits = Edits.of(changed, self._eos, vocab_size)
        if edited:
            which[plain:, 2], sections["masks"] = _masks(changed, vocab_size)
            sections |= {"place": edits.keys % (at_once * vocab_size), "change": edits.change}
        views = self._packer.upload(sections)

        tokens = torch.empty(len(samples), dtype=torch.int32, device=logits.device)
        if plain:
            choose(logits, vocab_size, views["which"][:plain], views["how"][:plain], tokens, gathered=True)
        for start in range(0, len(edited), at_once):
            part = slice(plain + start, plain + start + at_once)
            first, end = np.searchsorted(edits.keys, [start * vocab_size, (start + at_once) * vocab_size]).tolist()
            copy = copy_rows(logits, vocab_size, views["which"][part], views["masks"])
            edit(copy, views["place"], views["change"], first, end - first)
            choose(copy, vocab_size, views["which"][part], views["how"][part], tokens, gathered=False)
        return tokens

    def _settings(self, samples: Sequence[SampleRow]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """`which` with the top-k in column 1 and no masks, and `how`: the arguments of `isthmus.kernels.choose`."""
        rows = [self._setting(sample) for sample in samples]
        k, temperature, min_p, share, number = np.array(rows, np.float64).T
        which = np.zeros((len(rows), 4), np.int32)
        which[:, 1], which[:, 2] = k, -1
        temperature = np.minimum(temperature, _HOTTEST)
        with np.errstate(divide="ignore"):
            depth = temperature.astype(np.float32) * np.log(min_p).astype(np.float32)
        return which, np.stack((1 / temperature, depth, share, number), 1)

    def _setting(self, sample: SampleRow) -> tuple[float, float, float, float, float]:
        """top-k, temperature, min-p, top-p and the uniform number."""
        params = sample.params
        if is_greedy(params):
            return GREEDY, 1.0, 0.0, 1.0, 0.0
        number = self._random.random() if sample.seed is None else uniform(sample.seed, sample.position)
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        return top_k, params.temperature, params.min_p, params.top_p, number


def _masks(samples: Sequence[SampleRow], vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Which mask a row has, -1 for none, and the masks' bits, the lowest first: `[M, ceil(vocab_size / 8)]`."""
    index = np.full(len(samples), -1, np.int32)
    rows = [i for i, sample in enumerate(samples) if sample.mask is not None]
    index[rows] = np.arange(len(rows))
    bits = np.zeros((len(rows), -(-vocab_size // 8)), np.uint8)
    for line, row in zip(bits, rows, strict=True):
        mask = samples[row].mask
        assert mask is not None
        line[:] = np.packbits(mask.allowed(), bitorder="little")
    return index, bits
