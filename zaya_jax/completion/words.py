"""All words of `zaya`: commands, subcommands, their options and values, read from their argparse parsers."""

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Iterator

from zaya_jax.commands.registry import COMMANDS
from zaya_jax.config_help import field_helps
from zaya_jax.options import HELP_CONFIG, Parser, parser_of, takes_file, takes_folder

UNLISTED = {"convert": ("inspect",), "plan": ("failures",)}
"""Subcommands that are not choices of an argument, because the argument may also be a path."""
FILE, FOLDER, TEXT = "@file", "@folder", "@text"
"""Values of options without choices."""
_CUSTOM_CONFIG = ("data inspect",)
"""Commands that accept config fields, but define `--config` themselves."""
_TOP_OPTIONS = {"--help": "show all commands", "--version": "show the versions of zaya_jax and jax"}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
      names: names with their dashes.
      values: choices of its value, or one of FILE, FOLDER and TEXT; empty if it has no value.
      has_many_values: whether several values may follow it.
      help: description of the option.
    """

    names: tuple[str, ...]
    values: tuple[str, ...]
    has_many_values: bool
    help: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A command or subcommand.

    Attributes:
      path: words that select it, separated by spaces; "" for `zaya` itself.
      subcommands: description of each subcommand by its name.
      options: its options.
      operands: values of its positional arguments: choices, FILE or FOLDER.
      has_fields: whether it accepts `--config.SECTION.FIELD=VALUE`.
    """

    path: str
    subcommands: dict[str, str]
    options: tuple[Option, ...]
    operands: tuple[str, ...]
    has_fields: bool


def commands() -> Iterator[Command]:
    """Yields all commands, each followed by its subcommands. Imports their modules, and so jax."""
    top = tuple(Option((name,), (), False, summary) for name, summary in _TOP_OPTIONS.items())
    yield Command("", {name: summary for name, (_, summary) in COMMANDS.items()}, top, (), False)
    for name in COMMANDS:
        parser, *subparsers = parsers_of(name)
        words = [each.prog.rpartition(" ")[2] for each in subparsers]
        summaries = [_first_sentence(each.description) for each in subparsers]
        yield _command(name, parser, dict(zip(words, summaries, strict=True)))
        for word, each in zip(words, subparsers, strict=True):
            yield _command(f"{name} {word}", each, {})


def parsers_of(command: str) -> list[Parser]:
    """Returns the parser of a command, followed by those of its subcommands. Imports its module."""
    main = importlib.import_module(COMMANDS[command][0]).main
    parser = parser_of(main)
    operands = [action for action in parser.actions if not action.option_strings]
    # argparse cannot list subcommands here: a command parses its first word itself.
    choices = [str(choice) for action in operands for choice in action.choices or ()]
    parsers = (parser_of(main, word) for word in (*choices, *UNLISTED.get(command, ())))
    # A choice that does not lead to another parser is a plain operand.
    return [parser, *(each for each in parsers if each.prog != parser.prog)]


def _command(path: str, parser: Parser, subcommands: dict[str, str]) -> Command:
    operands = [each for action in parser.actions if not action.option_strings for each in _values(action)]
    return Command(
        path,
        subcommands,
        tuple(
            Option(tuple(action.option_strings), _values(action), _has_many(action), parser.help_of(action))
            for action in parser.actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ),
        # Keep the order of the help, without duplicates.
        tuple(dict.fromkeys(each for each in operands if each != TEXT and each not in subcommands)),
        # Commands that accept config fields also have --help-config.
        HELP_CONFIG in parser.option_names or path in _CUSTOM_CONFIG,
    )


def _values(action: argparse.Action) -> tuple[str, ...]:
    # Flags such as --help have no value.
    if action.nargs == 0:
        return ()
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if takes_folder(action):
        return (FOLDER,)
    return (FILE,) if takes_file(action) else (TEXT,)


def _has_many(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1)


def _first_sentence(text: str | None) -> str:
    return (text or "").partition(". ")[0].rstrip(".")


@functools.cache
def fields() -> dict[str, tuple[str, ...]]:
    """Returns the choices of each config field by dotted name; most fields have none.

    Fields in lists of sections, such as phases, are excluded: their names depend on the config.
    """
    return {field.path: field.choices for field in field_helps()}
