"""The offline API over a small arena."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.llm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def build(folder: Path, **changes: Any) -> LLM:
    settings = {"dtype": "float32", "pool_bytes": 1 << 20, "page_size": 4, "max_num_seqs": 8}
    return LLM(str(folder), **settings | {"max_num_batched_tokens": 16} | changes)
