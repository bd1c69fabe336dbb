"""Command-line flags and YAML keys, generated from the config dataclasses: one source, so they cannot drift apart."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from isthmus.engine.config import LAYERS, Setting, setting_of
from isthmus.errors import ConfigError, IsthmusError
from isthmus.params import SamplingParams


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are one line and exit code 2."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A verb names its own unknown flags, so that the error leads to the help of that verb."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an argument may abbreviate: nothing. `allow_abbrev` says so for flags with two dashes alone."""
        return []

    def error(self, message: str) -> NoReturn:
        """One line, where `--help` lies, exit code 2."""
        self.exit(2, f"isthmus: error: {message} (see {self.prog} --help)\n")


def add_engine_flags(parser: argparse.ArgumentParser, *more: type) -> None:
    """Every setting of every layer, and of `more` config classes; what is left out is absent from the namespace."""
    for name, (setting, kind) in engine_settings(*more).items():
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        if kind is bool:  # the flag's name says which of the two it sets
            options["action"] = "store_false" if setting.flag.startswith("--no-") else "store_true"
        elif setting.choices:
            options |= {"choices": setting.choices, "type": str}
            if setting.bare is not None:
                options |= {"nargs": "?", "const": setting.bare}
        else:
            options |= {"type": _converter(setting, kind), "metavar": "X"}
        if not setting.flag.startswith("-"):
            del options["dest"], options["metavar"]
            parser.add_argument(name, nargs="?", help=setting.help, **options)
            options["dest"] = name
        else:
            parser.add_argument(setting.flag, help=setting.help, **options)
        for alias in setting.aliases:
            parser.add_argument(alias, help=argparse.SUPPRESS, **options)
        for flag, choice in setting.shorthands:
            parser.add_argument(
                flag, help=argparse.SUPPRESS, dest=name, default=argparse.SUPPRESS, action="store_const", const=choice
            )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with the same names; the command line wins")


def engine_settings(*more: type) -> dict[str, tuple[Setting, Any]]:
    """Every setting with its declared type, by field name; those of `more` config classes after the engine's."""
    found: dict[str, tuple[Setting, Any]] = {}
    for config in (*LAYERS.values(), *more):
        hints = typing.get_type_hints(config)
        for spec in dataclasses.fields(config):
            if "setting" in spec.metadata:
                found[spec.name] = (setting_of(spec), hints[spec.name])
    return found


def engine_args(args: argparse.Namespace, *more: type) -> dict[str, Any]:
    """Keyword arguments for `LLM` from parsed flags, with `--config` underneath. ConfigError names what is wrong.

    With `more` config classes, their settings are among them.
    """
    known = engine_settings(*more)
    values = _from_yaml(args.config, known) if args.config is not None else {}
    values |= {name: getattr(args, name) for name in known if hasattr(args, name)}
    if not values.get("model"):
        raise ConfigError("no model given: name a hub id, a directory, a .gguf file, or demo")
    return values


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """The command line that gives these settings, as `engine_args` returned them."""
    known, line = engine_settings(), []
    for name, value in values.items():
        setting, kind = known[name]
        if not setting.flag.startswith("-"):
            line.append(str(value))
        elif kind is bool:
            line += [setting.flag] if value is not setting.flag.startswith("--no-") else []
        elif isinstance(value, Mapping):
            line += [setting.flag, ",".join(f"{key}={share}" for key, share in value.items())]
        else:
            line += [setting.flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return line


def _from_yaml(path: Path, known: Mapping[str, tuple[Setting, Any]]) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"--config {path}: a mapping of setting names to values is due")
    values = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--config {path}: unknown setting {key!r}")
        try:
            values[name] = _from_plain(value, *known[name])
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            raise ConfigError(f"--config {path}: {key}: {value!r} does not do: {error}") from error
    return values


def _from_plain(value: Any, setting: Setting, kind: Any) -> Any:
    """A YAML value as the setting's type: what the command line would make of it, lists joined by commas."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None or isinstance(value, bool):
        if type(value) in options:
            return value
        raise ValueError("a value of another type is due")
    if isinstance(value, Mapping):
        return _converter(setting, kind)(",".join(f"{name}={share}" for name, share in value.items()))
    if isinstance(value, list):
        return _converter(setting, kind)(",".join(map(str, value)))
    if isinstance(value, str | int | float):
        return _converter(setting, kind)(str(value))
    raise ValueError("a plain value is due")


def _converter(setting: Setting, kind: Any) -> Callable[[str], Any]:
    if setting.parse is not None:
        return _reporting(setting.parse)
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    plain: Callable[[str], Any] = kind
    return plain


def _reporting(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse swallows the text of a ValueError; keep ours."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (IsthmusError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


_SAMPLING_HELP = {
    "n": "continuations per prompt",
    "temperature": "0 is greedy",
    "top_p": "nucleus",
    "top_k": "0 is off",
    "min_p": "least share of the most likely token's probability",
    "presence_penalty": "-2 to 2",
    "frequency_penalty": "-2 to 2",
    "repetition_penalty": "0.001 to 1000; 1 is off",
    "seed": "of each request",
    "max_tokens": "most tokens to generate",
    "min_tokens": "least tokens to generate",
    "ignore_eos": "go on past the end token",
}


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """The sampling parameters, with their own defaults unless given here."""
    hints = typing.get_type_hints(SamplingParams)
    for spec in dataclasses.fields(SamplingParams):
        if spec.name not in _SAMPLING_HELP:
            continue
        flag, default = "--" + spec.name.replace("_", "-"), defaults.get(spec.name, spec.default)
        help_text = f"{_SAMPLING_HELP[spec.name]} (default {default})"
        if hints[spec.name] is bool:
            parser.add_argument(flag, action="store_true", default=default, help=help_text)
        else:
            kind = _converter(Setting("", flag), hints[spec.name])
            parser.add_argument(flag, type=kind, default=default, metavar="X", help=help_text)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams from parsed flags. ConfigError names a value out of range."""
    return SamplingParams(stop=args.stop, **{name: getattr(args, name) for name in _SAMPLING_HELP})
