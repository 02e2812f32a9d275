"""Generated reference pages: the help of each command, and all config fields."""

import functools
from typing import Any

from zaya_jax.commands.registry import COMMANDS
from zaya_jax.completion.words import parsers_of
from zaya_jax.config_help import FieldHelp, field_helps
from zaya_jax.errors import UserError
from zaya_jax.fields import describe_types
from zaya_jax.options import Parser

COLUMNS = 98
"""Width of the help texts, in characters."""


def commands_page() -> str:
    """The output of `zaya COMMAND --help` for all commands and subcommands, as Markdown."""
    blocks = ["# Help of all commands", "The output of `zaya COMMAND --help`."]
    for command, (_, summary) in COMMANDS.items():
        parser, *subparsers = parsers_of(command)
        blocks += [f"## {parser.prog}", summary.capitalize() + ".", _help(parser)]
        for each in subparsers:
            blocks += [f"### {each.prog}", _help(each)]
    return "\n\n".join(blocks) + "\n"


def _help(parser: Parser) -> str:
    # argparse breaks lines at the width of the terminal, which must not change the page.
    formatter: Any = parser.formatter_class
    parser.formatter_class = functools.partial(formatter, width=COLUMNS)
    return f"```text\n{parser.format_help().rstrip()}\n```"


def config_page() -> str:
    """All config fields with types, defaults and meaning, as Markdown.

    Raises:
      UserError: if the docstring of a section does not explain a field.
    """
    blocks = ["# All config fields", "Set a field with `--config.SECTION.FIELD=VALUE`."]
    section = ""
    for field in field_helps():
        if not field.text:
            raise UserError(f"config field {field.path} is not explained in the docstring of its section")
        if field.section != section:
            section = field.section
            blocks.append(f"## {section}")
        blocks.append(_field_entry(field))
    return "\n\n".join(blocks) + "\n"


def _field_entry(field: FieldHelp) -> str:
    return f"**{field.path}**: {field.text}  \n`{describe_types((field.hint,))}`, default `{field.default}`"
