"""Four requests to a tiny model whose memory is checked, and what is right when something goes wrong."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from isthmus.engine.output import CompletionOutput
from isthmus.engine.sanitizer import GuardedPool
from tests.engine.sanitized import MODEL, engine_for, ids_of, in_use, place, serve
from tests.engine.test_device_runner import random_prompts
from tests.model.harness import paged, reference, tiny

PROMPTS = dict(sorted(zip("abcds", random_prompts(21, 9, 14, 26, 33), strict=True), key=lambda item: item[0] != "s"))
NEW = {"s": 2, "a": 14, "b": 14, "c": 14, "d": 14}  # "s" ends before the others and leaves holes


@dataclasses.dataclass(frozen=True)
class Truth:
    """A tiny model with two window layers and a full one, and what Transformers says."""

    model: PreTrainedModel
    wanted: dict[str, list[int]]

    @classmethod
    def of(cls) -> Truth:
        model = tiny("gemma3_text", **MODEL)
        wanted = {name: reference(model, prompt, NEW[name]) for name, prompt in PROMPTS.items()}
        assert all(len(set(wanted[name])) >= 5 for name in "abcd"), "degenerate tokens prove nothing"
        return cls(paged(model), wanted)


class Case:
    """An engine that serves four requests, and what is said when something goes wrong."""

    def __init__(self, truth: Truth, caplog: pytest.LogCaptureFixture, **settings: Any) -> None:
        self.truth = truth
        self.caplog = caplog
        self.engine, self.runner = engine_for(truth.model, **settings)
        caplog.set_level(logging.ERROR, "isthmus")

    @property
    def reports(self) -> list[str]:
        """All faults that were told."""
        messages = [record.getMessage() for record in self.caplog.records]
        return [message for message in messages if message.startswith("memory fault")]

    def serve(self, between: Callable[[int], object] | None = None) -> dict[str, CompletionOutput]:
        """Serve everybody; nothing is left in use, and nothing of what is fenced is ever handed out."""
        outputs = serve(self.engine, PROMPTS, NEW, between)
        self.engine.reset_prefix_cache()
        assert in_use(self.engine) == 0
        return outputs

    def plant(self, at: int, fault: Callable[[], object], victims: str) -> str:
        """Serve with a fault before step `at`. The victims end with an excuse, the others are right, and so is
        everybody in the next round. Returns the first report."""
        outputs = self.serve(lambda step: fault() if step == at else None)
        return self.judge(outputs, victims)

    def judge(self, outputs: dict[str, CompletionOutput], victims: str) -> str:
        """See `plant`."""
        assert self.reports, "nothing was found"
        for name, output in outputs.items():
            wanted = self.truth.wanted[name]
            if name in victims:
                assert (output.finish_reason, len(output.token_ids) < NEW[name]) == ("abort", True), name
                assert str(output.stop_reason).startswith("memory fault: ")
                assert output.token_ids == wanted[: len(output.token_ids)], "what went out before was right"
            else:
                assert (output.finish_reason, output.token_ids) == ("length", wanted), name
        told, count = self.reports[0], len(self.reports)
        again = self.serve()
        assert {name: output.token_ids for name, output in again.items()} == self.truth.wanted
        assert len(self.reports) == count, "nothing more to tell"
        return told

    def running(self) -> list[str]:
        """Who runs."""
        return [sequence.request.request_id for sequence in self.engine.scheduler.running]

    def ids(self, name: str) -> list[int]:
        return ids_of(self.engine, name)

    def place(self, group: str, virtual: int) -> int:
        return place(self.engine, group, virtual)

    def is_fenced(self, group: str, page: int) -> bool:
        pool = self.engine.pool
        assert isinstance(pool, GuardedPool)
        owner = int(pool.regions[group].owner[page])
        return owner > 0 and page in pool.regions[group].pins and self.is_fenced_id(owner)

    def is_fenced_id(self, virtual: int) -> bool:
        pool = self.engine.pool
        assert isinstance(pool, GuardedPool)
        return bool(pool.fenced["tokens"][virtual])


def told(report: str, **lines: str) -> None:
    """A report has these lines, by their first word."""
    for word, text in lines.items():
        found = re.search(rf"^  {word} +(.*)$", report, re.MULTILINE)
        assert found is not None, report
        assert text in found[1], report
