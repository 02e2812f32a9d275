"""Command-line options that verbs share: `--config=FILE --config.section.field=value`."""

import argparse
import ast
import dataclasses
import runpy
import sys
import typing
from collections.abc import Sequence
from typing import Any, Literal

from ml_collections import ConfigDict

from zaya_jax.config import CONFIG_FILE, Config, find_config

DEFAULT_CONFIG = "configs/tiny.py"


class Parser(argparse.ArgumentParser):
    """An argparse parser that shows examples, and complains in one sentence."""

    def __init__(self, verb: str, summary: str, examples: Sequence[str]):
        super().__init__(
            prog=f"zaya {verb}",
            description=summary,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> typing.NoReturn:
        """Raises what argparse would print.

        Raises:
          ValueError: always.
        """
        raise ValueError(f"{message}; {self.prog} --help has the options")


def add_config_options(parser: Parser) -> None:
    """Adds `--config`; its fields are left over by `parse_known_args` for `load_config`."""
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="a config file, or a run's config.json (default: %(default)s)",
    )
    parser.add_argument_group(
        "config fields",
        "--config.SECTION.FIELD=VALUE sets any field; --config.run_folder=FOLDER the run's folder",
    )


def load_config(path: str, overrides: Sequence[str]) -> Config:
    """Builds the config of a file, with fields set on the command line.

    Args:
      path: of a Python file with `get_config()`.
      overrides: of the form "--config.section.field=value".

    Raises:
      ValueError: if there is no such file, it is not a config file, or a value cannot be.
    """
    values = _read_file(path)
    for option in overrides:
        name, equals, text = option.partition("=")
        if not name.startswith("--config.") or not equals:
            raise ValueError(
                f'"{option}" is not an option; a config field is set by --config.section.field=value'
            )
        _set(values, name.removeprefix("--config."), text)
    return Config.from_dict(values)


def _read_file(path: str) -> dict[str, Any]:
    file = find_config(path)
    if file.name == CONFIG_FILE:  # of a run
        try:
            return dataclasses.asdict(Config.from_text(file.read_text()))
        except ValueError as error:
            raise ValueError(f"{path} is not the config of a run: {error}") from error
    sys.path.insert(0, str(file.parent))  # a config may begin with one beside it
    try:
        namespace = runpy.run_path(str(file))
    finally:
        sys.path.remove(str(file.parent))
    if not callable(namespace.get("get_config")):
        raise ValueError(f"{path} is not a config file: it must define get_config()")
    config = namespace["get_config"]()
    if not isinstance(config, ConfigDict):
        raise ValueError(f"get_config() of {path} gives a {type(config).__name__}; it must give a ConfigDict")
    return config.to_dict()


def _set(values: dict[str, Any], name: str, text: str) -> None:
    *sections, field = name.split(".")
    section, kind = values, Config
    for part in sections:
        hint = typing.get_type_hints(kind).get(part) if kind else None
        kind = hint if dataclasses.is_dataclass(hint) else None
        section = section.setdefault(part, {})
        if not isinstance(section, dict) or (hint and not kind):
            raise ValueError(f'"{name}" is no config field: "{part}" has no fields of its own')
    hint = typing.get_type_hints(kind).get(field) if kind else None
    section[field] = _parse(text, hint)


def _parse(text: str, hint: Any) -> Any:
    """The value that a text stands for: itself where a text is wanted, else a Python literal."""
    options = (hint, *typing.get_args(hint))
    is_text = str in options or any(isinstance(o, str) or typing.get_origin(o) is Literal for o in options)
    is_none = text == "None" and type(None) in options
    if is_text and not is_none and typing.get_origin(hint) is not tuple:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
