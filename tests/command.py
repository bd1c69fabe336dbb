"""The command line as tests call it, and how it says what a user got wrong."""

from __future__ import annotations

from isthmus.cli import main


def run(*args: object) -> int:
    """The exit code of a command in this process."""
    try:
        return main([str(arg) for arg in args])
    except SystemExit as stop:  # argparse's own errors
        return int(stop.code or 0)


def refusal(code: int | None, out: str, err: str) -> str:
    """The one line on standard error of a command that ended with code 2 and printed nothing else."""
    assert code == 2, err
    assert out == ""
    assert err.startswith("isthmus: error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n"), err
    return err
