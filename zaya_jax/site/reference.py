"""Generated reference pages: the help of each command, and all config fields."""

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator

from zaya_jax.commands.registry import COMMANDS
from zaya_jax.config_help import FieldHelp, field_helps
from zaya_jax.errors import UserError
from zaya_jax.fields import describe_types
from zaya_jax.platform.shell import zaya_command

_CHOICES = re.compile(r"\{([a-z][a-z-]*(?:,[a-z][a-z-]*)*)\}")
_LISTED = re.compile(r"^  [A-Z]+ +((?:[a-z-]+,\s+)+[a-z-]+)$", re.MULTILINE)


def commands_page() -> str:
    """The output of `zaya COMMAND --help` for all commands and subcommands, as Markdown."""
    blocks = ["# Help of all commands", "The output of `zaya COMMAND --help`."]
    for command, (_, summary) in COMMANDS.items():
        text = _help([command])
        assert text, f"zaya {command} --help prints nothing"
        blocks += [f"## zaya {command}", summary.capitalize() + ".", _fenced(text)]
        for subcommand, more in _subcommands(command, text):
            blocks += [f"### zaya {command} {subcommand}", _fenced(more)]
    return "\n\n".join(blocks) + "\n"


def _subcommands(command: str, text: str) -> Iterator[tuple[str, str]]:
    """Subcommands that have their own help, with that help."""
    usage = text.partition("\n\n")[0]
    names = [name for choices in _CHOICES.findall(usage) for name in choices.split(",")]
    if listed := _LISTED.search(text):  # `zaya aegis` and `zaya ckpt` have a parser for each subcommand
        names += re.findall(r"[a-z-]+", listed[1])
    # A subcommand that only an example mentions: `zaya plan failures`.
    names += re.findall(rf"^  zaya {command} ([a-z][a-z-]+)(?= |$)", text, re.MULTILINE)
    # A command that ignores the word prints its own help once more.
    printed = {text}
    for name in dict.fromkeys(names):
        more = _help([command, name])
        if more and more not in printed:
            printed.add(more)
            yield name, more


def _help(words: list[str]) -> str:
    """The output of a command with `--help`; empty if it does not accept the words."""
    columns, printed = os.environ.get("COLUMNS"), io.StringIO()
    # argparse breaks lines at the width of the terminal, which must not change the page.
    os.environ["COLUMNS"] = "100"
    main = importlib.import_module(COMMANDS[words[0]][0]).main
    try:
        with contextlib.redirect_stdout(printed):
            main([*words[1:], "--help"])
    except SystemExit as leaving:
        if leaving.code:
            return ""
    except ValueError:
        return ""
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    # Examples begin with the path by which this shell finds the command.
    return printed.getvalue().replace(f"{zaya_command()} ", "zaya ")


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


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
