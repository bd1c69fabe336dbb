"""Errors a user can act on: each is one line that says what, where and what to do."""

from __future__ import annotations


class IsthmusError(Exception):
    """An error the user can act on. Its message is one line; the command line prints it and exits with 2."""


class ModelError(IsthmusError):
    """A model that cannot be found, read or served."""


class ConfigError(IsthmusError, ValueError):
    """A setting that makes no sense, alone or beside another one."""
