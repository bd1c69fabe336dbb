"""Tasks of the lm-evaluation-harness: find them, have a model answer them, take the scores."""

from __future__ import annotations

import difflib
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from isthmus.errors import ConfigError

VERSION: str = lm_eval.__version__

_SEED = 1234  # of the harness' own command line, so that the same questions are asked

_log = logging.getLogger(__name__)


def find(names: Sequence[str], folder: Path | None) -> dict[str, Any]:
    """Tasks and groups with their data, as `evaluate` takes them.

    A name of the folder's wins over one that comes with the harness. ConfigError for a name that nobody knows, and for
    data that is not there.
    """
    path = None if folder is None else str(folder)
    manager = TaskManager(include_path=path, include_defaults=False)  # the harness' own are many thousands
    if _unknown(manager, names):
        manager = TaskManager(include_path=path)
    for name in _unknown(manager, names):
        near = difflib.get_close_matches(name, manager.all_tasks, 1)
        hint = f"; {near[0]} is one" if near else ""
        raise ConfigError(f"--tasks: no task {name!r}{hint}: lm-eval ls tasks lists them, --include-path adds a folder")
    random.seed(0)  # some tasks shuffle when they are made; these are the harness' own seeds too
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    try:
        found: dict[str, Any] = manager.load(list(names))
    except Exception as error:  # a task is a program of its makers, and its data comes from anywhere
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--tasks {','.join(names)}: the data cannot be loaded ({type(error).__name__}: {line:.200}); tasks over "
            "local files (--include-path) need no network"
        ) from error
    return found


def evaluate(
    model: LM,
    tasks: dict[str, Any],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    samples: bool = False,
) -> dict[str, Any]:
    """What the harness finds out, as plain data.

    Args:
        limit: only the first so many questions of each task.
        num_fewshot: solved examples before each; None: what a task says.
        chat: by the model's chat template, each example a turn.
        samples: with every question and answer.
    """
    for name, task in tasks["tasks"].items():
        usual = task.get_config("num_fewshot")
        if num_fewshot is not None and usual == 0:
            _log.warning("--num-fewshot is ignored for %s, which allows no examples", name)
        elif num_fewshot is not None or usual is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=_SEED)
    results = lm_eval.evaluate(
        lm=model,
        task_dict=tasks,
        limit=limit,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        log_samples=samples,
    )
    plain: dict[str, Any] = json.loads(json.dumps(results, default=handle_non_serializable))
    return plain


def _unknown(manager: TaskManager, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]
