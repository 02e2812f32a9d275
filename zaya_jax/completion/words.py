"""All words of `zaya`: its verbs, their options and what these take, as their own parsers have them."""

import argparse
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

from zaya_jax.config_help import field_helps
from zaya_jax.options import HELP_CONFIG, Parser, parser_of
from zaya_jax.verbs import VERBS

UNNAMED = {"convert": ("inspect",), "plan": ("failures",)}
"""Verbs within verbs that are no choice of a parser: another word may stand in their place."""
FILE, FOLDER, TEXT = "@file", "@folder", "@text"
"""What an option takes that has no choices."""
_FOLDERS = ("RUN", "RUN[:STEP]", "CORPUS", "FOLDER", "SRC", "DST", "OUT")
_FILES = ("FILE", "PATH")
"""What arguments are called that name something on the disk; an OUT or a DST may lie in a folder."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a verb.

    Attributes:
      names: with their dashes.
      takes: the choices of its value, or FILE, FOLDER or TEXT; () for none.
      takes_many: whether several values may follow.
      about: what its help says.
    """

    names: tuple[str, ...]
    takes: tuple[str, ...]
    takes_many: bool
    about: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A verb, or one within another.

    Attributes:
      path: the words that name it, with spaces; "" is `zaya` itself.
      verbs: that may follow, with what each does.
      options: that it takes.
      operands: what may follow beside verbs and options: choices, FILE or FOLDER.
      takes_fields: whether `--config.SECTION.FIELD=VALUE` is an option too.
    """

    path: str
    verbs: dict[str, str]
    options: tuple[Option, ...]
    operands: tuple[str, ...]
    takes_fields: bool


def commands() -> Iterator[Command]:
    """All verbs, and those within them behind each. Imports all of them, and so jax."""
    top = tuple(Option((name,), (), False, about) for name, about in _TOP.items())
    yield Command("", {verb: about for verb, (_, about) in VERBS.items()}, top, (), False)
    for verb, (module, _) in VERBS.items():
        yield from _commands_of(verb, importlib.import_module(module).main)


_BESIDE = ("data inspect",)
"""Verbs that take fields with a `--config` of their own."""
_TOP = {"--help": "all verbs", "--version": "of zaya_jax and jax"}


def _commands_of(verb: str, main: Callable[[Sequence[str]], None]) -> Iterator[Command]:
    parser = parser_of(main)
    operands = [action for action in parser.actions if not action.option_strings]
    choices = [str(choice) for action in operands for choice in action.choices or ()]
    inner = {word: parser_of(main, word) for word in (*choices, *UNNAMED.get(verb, ()))}
    # A word behind which the same parser goes on is an operand like others.
    own = {word: each for word, each in inner.items() if each.prog != parser.prog}
    abouts = {word: _sentence(each.description) for word, each in own.items()}
    yield _command(verb, parser, abouts)
    for word, each in own.items():
        yield _command(f"{verb} {word}", each, {})


def _command(path: str, parser: Parser, verbs: dict[str, str]) -> Command:
    operands = [each for action in parser.actions if not action.option_strings for each in _takes(action)]
    return Command(
        path,
        verbs,
        tuple(
            Option(tuple(action.option_strings), _takes(action), _takes_many(action), parser.help_of(action))
            for action in parser.actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ),
        tuple(dict.fromkeys(each for each in operands if each != TEXT and each not in verbs)),
        HELP_CONFIG in parser.option_names or path in _BESIDE,
    )


def _takes(action: argparse.Action) -> tuple[str, ...]:
    if action.nargs == 0:
        return ()
    if action.choices is not None:
        return tuple(map(str, action.choices))
    name = str(action.metavar or action.dest.upper())
    if name in _FOLDERS or name.endswith("FOLDER"):
        return (FOLDER,)
    return (FILE,) if name in _FILES or action.type is pathlib.Path else (TEXT,)


def _takes_many(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1)


def _sentence(text: str | None) -> str:
    return (text or "").partition(". ")[0].rstrip(".")


@functools.cache
def fields() -> dict[str, tuple[str, ...]]:
    """The config's fields that have one place, by dotted name, with their choices; most have none."""
    return {field.path: field.choices for field in field_helps()}
