"""Shared helpers of the test suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from _pytest.runner import pytest_runtest_protocol as _run

import tests.plain
from isthmus.engine.wide_frame import wide_frame

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether it is compiled or interpreted: before any test imports one.
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.interpreter  # noqa: F401

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_file(name: str) -> Path:
    """The path of a data file; the test fails loudly where it is missing.

    They lie beside the checkout in shared/data, or in the folder that the environment variable ISTHMUS_SHARED_DATA
    names.
    """
    path = Path(os.environ.get("ISTHMUS_SHARED_DATA", SHARED)) / name
    if not path.is_file():
        pytest.fail(
            f"{path} is missing: these tests read data that lies beside the checkout in shared/data, or where "
            "ISTHMUS_SHARED_DATA says"
        )
    return path


_run_widely = wide_frame(FunctionType(_run.__code__, _run.__globals__))
"""Runs a test. Without a wide frame, loops at some depths spent a third of their time on the interpreter's stack."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    return _run_widely(item, nextitem)


def pytest_collection_finish() -> None:
    """Modules are no garbage: what looks for it need not go through them again and again."""
    gc.freeze()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with a window of 8 tokens, as a file."""
    from tests.model.tiny_gguf import tiny_model, write_gguf  # noqa: PLC0415 - few tests need it

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, "gemma3", tiny_model("gemma3"))
    return path


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted is kept as long as the tests run, not in the user's cache."""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


_INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@pytest.fixture(params=[pytest.param("cpu", marks=_INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test's kernels run: compiled on a GPU, through Triton's interpreter where there is none."""
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT has its default action, here and in processes that are started, though a shell's `&` had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
