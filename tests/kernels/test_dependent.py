"""What kernels that begin early read before they wait: by their source, that nothing of the forward is among it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module

import pytest
from tests.kernels.offline import EARLY

ORDINARY = {"p_pages", "p_fresh", "p_tokens", "p_slots", "p_items", "p_bounds", "p_table"}
"""Written before the tokens are embedded, which is an ordinary launch."""

OWN = {"p_state"}
"""Written by this very kernel in the step before."""

LOADED = {"linear: _few_rows_linear_kernel": {"p_weight"}, "linear_row: _row_linear_kernel": {"p_weight"}}
"""Parameters of the model as they were loaded: `DeviceLinear` gives its own and nothing made of it."""


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions that come to `wait_for_previous`."""
    for name in EARLY:
        module = "attention_decode" if name == "attention" else name
        tree = ast.parse(inspect.getsource(import_module(f"isthmus.kernels.{module}")))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(called(node, "wait_for_previous")):
                yield f"{module}: {node.name}", node


def called(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            yield call


def pointers(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id.startswith("p_")}


def read_before_waiting(kernel: ast.FunctionDef) -> set[str]:
    """Arguments that are handed to anything before the wait, by themselves or as a pointer made of them."""
    (wait,) = called(kernel, "wait_for_previous")
    made: dict[str, set[str]] = {}
    found: set[str] = set()
    for statement in kernel.body:
        if statement.lineno >= wait.lineno:
            break
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                found |= {root for name in pointers(node) for root in made.get(name, {name})}
        if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            made[target.id] = {root for name in pointers(statement.value) for root in made.get(name, {name})}
    return found


KERNELS = dict(kernels())


def test_every_module_has_one() -> None:
    assert len(KERNELS) >= len(EARLY)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_read_early_is_there(kernel: str) -> None:
    """A parameter of the model may be, but what a layer computes of it is not: so it counts as of the forward, unless
    nobody can give the kernel anything else."""
    assert read_before_waiting(KERNELS[kernel]) <= ORDINARY | OWN | LOADED.get(kernel, set())
