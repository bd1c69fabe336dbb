"""Are the bytes of pages numbers?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.memory import Group


def layers_with_nan(
    arena: Tensor, group: Group, pages: NDArray[np.int64], tokens: NDArray[np.int64]
) -> Sequence[str | None]:
    """Per page the first layer that holds NaN among its first `tokens[i]` tokens, or None. Reads the device."""
    spec, found = group.spec, [None] * len(pages)
    if not len(pages):
        return found
    result: list[str | None] = list(found)
    index = torch.from_numpy(pages).to(arena.device)
    whole = arena[: arena.numel() // spec.page_bytes * spec.page_bytes].view(-1, spec.page_bytes).index_select(0, index)
    kept = torch.arange(spec.page_size)[None] < torch.from_numpy(tokens)[:, None]  # [n, page_size]
    for part in spec.parts:
        rows = whole[:, part.offset : part.offset + part.nbytes].contiguous().view(getattr(torch, part.dtype))
        strange = rows.float().isnan().view(len(pages), -1)
        if group.kind != "state":
            strange = strange.view(len(pages), spec.page_size, -1).any(-1).cpu() & kept
        for i in strange.any(-1).nonzero().flatten().tolist():
            result[i] = result[i] or part.name.split(".")[0]
    return result
