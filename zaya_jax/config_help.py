"""`--help-config`: all config fields by section, with their values and meanings."""

import dataclasses
import inspect
import re
import shlex
import shutil
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal

from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.fields import describe_types, did_you_mean, union_members

MAX_COLUMNS = 100
"""Maximum line length, also in wider terminals, because longer lines are hard to read."""


@dataclasses.dataclass(frozen=True)
class FieldHelp:
    """Documentation of a config field.

    Attributes:
      path: dotted name of the field.
      hint: type annotation.
      default: default value.
      text: description in the docstring of its section.
    """

    path: str
    hint: Any
    default: Any
    text: str

    @property
    def section(self) -> str:
        """Dotted name of its section; "" for a field of the config itself."""
        return self.path.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of the field, if there is a finite number; empty otherwise."""
        values: list[str] = []
        for option in union_members(self.hint):
            if typing.get_origin(option) is Literal:
                values += map(str, typing.get_args(option))
            elif option is bool:
                values += ["True", "False"]
            elif option is type(None):
                values.append("None")
        # An optional number or text has None and values without end.
        return () if values == ["None"] else tuple(values)


def field_helps(kind: Any = Config, prefix: str = "") -> Iterator[FieldHelp]:
    """Yields all fields outside lists of sections, by section; those of the config itself come first."""
    hints, texts = typing.get_type_hints(kind), _attribute_texts(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    sections = [name for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
    for name in (*(each for each in hints if each not in sections), *sections):
        if name in sections:
            yield from field_helps(hints[name], f"{prefix}{name}.")
        else:
            default = None if fields[name].default is dataclasses.MISSING else fields[name].default
            yield FieldHelp(prefix + name, hints[name], default, texts.get(name, ""))


def describe_fields(config: Config, pattern: str = "") -> str:
    """Describes config fields: value, type, default and meaning.

    Args:
      config: config whose values are shown.
      pattern: part of the dotted name, such as "optimizer" or "learning_rate", to show only matching fields
        with their full descriptions; "" shows all fields with the first sentence of each.

    Raises:
      UserError: if no field matches the pattern.
    """
    known = list(field_helps())
    matching = [field for field in known if pattern.replace("-", "_") in field.path]
    if not matching:
        names = {part for field in known for part in (field.path, *field.path.split("."))}
        hint = did_you_mean(pattern, sorted(names)) or f"sections are {', '.join(_sections(known))}"
        raise UserError(f'no config field has "{pattern}" in its name; {hint}')
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    sections, lines = _attribute_texts(Config), []
    for i, field in enumerate(matching):
        if i == 0 or field.section != matching[i - 1].section:
            about = sections.get(field.section, "the run itself.")
            lines += ["" if i else None, *textwrap.wrap(f"{field.section or 'config'}: {about}", width)]
        lines += _describe(field, _value(config, field.path), width, in_full=bool(pattern))
    return "\n".join(line for line in lines if line is not None)


def _describe(field: FieldHelp, value: Any, width: int, *, in_full: bool) -> list[str]:
    # Show a default only where the config differs from it.
    changed = "" if value == field.default else f"; default {field.default}"
    text = field.text if in_full else _first_sentence(field.text)
    # Never break a word: options are meant to be copied.
    wrapper = textwrap.TextWrapper(width, "  ", "    ", break_long_words=False, break_on_hyphens=False)
    option = wrapper.wrap(f"--config.{field.path}={shlex.quote(str(value))}")
    wrapper.initial_indent = wrapper.subsequent_indent = "      "
    return [*option, *wrapper.wrap(f"({describe_types(union_members(field.hint))}{changed}) {text}")]


def _sections(fields: list[FieldHelp]) -> list[str]:
    return list(dict.fromkeys(field.section for field in fields if field.section))


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return f"({', '.join(each.name for each in value)})"  # phases and mixtures have names
    return value


def _first_sentence(text: str) -> str:
    match = re.match(r".*?\.(?=\s|$)", text)
    return match[0] if match else text


def _attribute_texts(kind: type) -> dict[str, str]:
    """Returns the description of each attribute in a class's docstring, as one line."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    name = ""
    # An entry begins with "  name: "; more deeply indented lines continue it.
    for line in attributes.splitlines():
        if (match := re.match(r"  (\w+): (.*)", line)) is not None:
            name = match[1]
            texts[name] = match[2]
        elif name and line.startswith("    "):
            texts[name] += f" {line.strip()}"
    return texts
