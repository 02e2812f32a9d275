"""`--help-config`: all fields of a config by section, as they are and what they mean."""

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
from zaya_jax.fields import describe_types, did_you_mean

MOST_COLUMNS = 100
"""Longer lines are hard to read, however wide a terminal is."""


@dataclasses.dataclass(frozen=True)
class FieldHelp:
    """What is known of a field.

    Attributes:
      path: its dotted name.
      hint: its type.
      default: without a config file.
      text: of the docstring of its section.
    """

    path: str
    hint: Any
    default: Any
    text: str

    @property
    def section(self) -> str:
        """The dotted name before its own; "" of a field of the config itself."""
        return self.path.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have, where they can be counted."""
        found: list[str] = []
        for option in _options(self.hint):
            if typing.get_origin(option) is Literal:
                found += map(str, typing.get_args(option))
            elif option is bool:
                found += ["True", "False"]
            elif option is type(None):
                found.append("None")
        # A number may be many more, beside None.
        return () if found == ["None"] else tuple(found)


def field_helps(kind: Any = Config, prefix: str = "") -> Iterator[FieldHelp]:
    """All fields that have one place, in the order of their sections; those of the config itself first."""
    hints, texts = typing.get_type_hints(kind), _attribute_texts(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    sections = [name for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
    for name in (*(each for each in hints if each not in sections), *sections):
        if name in sections:
            yield from field_helps(hints[name], f"{prefix}{name}.")
        else:
            yield FieldHelp(prefix + name, hints[name], _default(fields[name]), texts.get(name, ""))


def describe_fields(config: Config, pattern: str = "") -> str:
    """Fields of a config as text: values, types, defaults, and a sentence; with a pattern, all that is said.

    Args:
      config: whose values are shown.
      pattern: what the dotted name must have in it, "optimizer" or "learning_rate"; "" shows all fields.

    Raises:
      ValueError: for a pattern that no field has.
    """
    known = list(field_helps())
    found = [field for field in known if pattern.replace("-", "_") in field.path]
    if not found:
        names = {part for field in known for part in (field.path, *field.path.split("."))}
        hint = did_you_mean(pattern, sorted(names)) or f"sections are {', '.join(_sections(known))}"
        raise ValueError(f'no config field has "{pattern}" in its name; {hint}')
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    sections, lines = _attribute_texts(Config), []
    for i, field in enumerate(found):
        if i == 0 or field.section != found[i - 1].section:
            about = sections.get(field.section, "the run itself.")
            lines += ["" if i else None, *textwrap.wrap(f"{field.section or 'config'}: {about}", width)]
        lines += _describe(field, _value(config, field.path), width, in_full=bool(pattern))
    return "\n".join(line for line in lines if line is not None)


def _describe(field: FieldHelp, value: Any, width: int, *, in_full: bool) -> list[str]:
    changed = "" if value == field.default else f"; default {field.default}"
    text = field.text if in_full else _first_sentence(field.text)
    # Never cut within a word: an option that is copied must be whole.
    kept = {"width": width, "break_long_words": False, "break_on_hyphens": False}
    return [
        *textwrap.wrap(
            f"--config.{field.path}={shlex.quote(str(value))}",
            initial_indent="  ",
            subsequent_indent="    ",
            **kept,
        ),
        *textwrap.wrap(
            f"({describe_types(_options(field.hint))}{changed}) {text}",
            initial_indent="      ",
            subsequent_indent="      ",
            **kept,
        ),
    ]


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, itself."""
    is_plain = typing.get_origin(hint) in (None, Literal, tuple)
    return (hint,) if is_plain or not typing.get_args(hint) else typing.get_args(hint)


def _sections(fields: list[FieldHelp]) -> list[str]:
    return list(dict.fromkeys(field.section for field in fields if field.section))


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return f"({', '.join(each.name for each in value)})"  # phases and mixtures go by their names
    return value


def _default(field: dataclasses.Field) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def _first_sentence(text: str) -> str:
    found = re.match(r".*?\.(?=\s|$)", text)
    return found[0] if found else text


def _attribute_texts(kind: type) -> dict[str, str]:
    """What a class's docstring says of each attribute, each on one line."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        if (begun := re.match(r"  (\w+): (.*)", line)) is not None:
            name = begun[1]
            texts[name] = begun[2]
        elif name and line.startswith("    "):
            texts[name] += f" {line.strip()}"
    return texts
