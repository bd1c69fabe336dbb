"""In the place of fla-core, which needs a GPU: what it computes of what it is given, by our own rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from isthmus.kernels.fla_chunks import CHUNK, Forward
from isthmus.kernels.gated_delta import gated_delta_rule
from isthmus.kernels.kda import kimi_delta_rule
from isthmus.kernels.states import StateStep


class _Remembered:
    """What the library remembers by the identity of bounds: it must not meet the same tensor with other numbers."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Tensor, Tensor]] = deque(maxlen=4)

    def check(self, bounds: Tensor) -> None:
        for known, numbers in self._seen:
            if known is bounds:
                assert torch.equal(bounds, numbers), "what was made of the old numbers would be used again"
                return
        self._seen.append((bounds, bounds.clone()))


def _stand_in(rule: Callable[..., Tensor]) -> Forward:
    remembered = _Remembered()

    def forward(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor,
        chunk_indices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert output_final_state
        assert scale == k.shape[-1] ** -0.5
        for x in (q, k, v, g, beta, initial_state, cu_seqlens, chunk_indices):
            assert x.is_contiguous(), "the library takes addresses, no strides"
        remembered.check(cu_seqlens)
        bounds = cu_seqlens.cpu().numpy()
        counts = bounds[1:] - bounds[:-1]
        assert initial_state[torch.from_numpy(counts > 0)].isfinite().all()
        assert len(q[0]) == len(v[0]) == len(g[0]) == len(beta[0]) == bounds[-1]
        assert len(initial_state) == len(bounds) - 1
        cut = [(i, j) for i, n in enumerate(counts) for j in range(-(-int(n) // CHUNK))]
        assert [tuple(row) for row in chunk_indices.tolist()[: len(cut)]] == cut
        for member, rank in chunk_indices.tolist()[len(cut) :]:  # nobody's: they begin behind the end of a member
            assert rank * CHUNK >= counts[member] > 0
        for x in (q, k):
            torch.testing.assert_close(x.float().norm(dim=-1), torch.ones(x.shape[:-1]), rtol=0, atol=1e-2)
        view = torch.cat((torch.full_like(initial_state[:1], torch.nan), initial_state))
        pages = torch.arange(1, len(view)).numpy()
        out = rule(StateStep.of(bounds, pages, pages), view, q[0], k[0], v[0], g[0], beta[0])
        return out[None], view[1:]

    return forward


@cache
def stand_ins() -> Mapping[str, Forward]:
    """As `isthmus.kernels.fla_chunks.forwards`."""
    return {"gated_delta_rule": _stand_in(gated_delta_rule), "kimi_delta_rule": _stand_in(kimi_delta_rule)}
