"""Builds frozen dataclasses from plain values, with type checks and clear errors, and converts them back.

This module does not import jax, and does not know what the values mean: rules are in `zaya_jax.config`.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar, cast

from ml_collections import ConfigDict

from zaya_jax.errors import UserError

T = TypeVar("T")


class UnknownField(UserError):
    """A section has no field of this name.

    Attributes:
      section: dotted name of the section.
      name: the unknown name.
      subject: first part of the message, without the hint.
    """

    def __init__(self, section: str, name: str, known: Iterable[str]):
        self.section, self.name = section, name
        self.subject = f'unknown config field "{join_path(section, name)}"'
        hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
        super().__init__(f"{self.subject}; {hint}")


def build(cls: type[T], values: Any, path: str) -> T:
    """Builds a dataclass from a dictionary of its fields, including nested dataclasses.

    Args:
      cls: the dataclass, whose annotations determine the types of the values.
      values: fields by name; others have their defaults.
      path: dotted name of the section, for error messages.

    Raises:
      UserError: for an unknown or missing field, a value of the wrong type, or one that `cls` refuses.
    """
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict):
        raise UserError(f"{path or 'the config'} is {values!r}; it must be a section with {', '.join(hints)}")
    for name in values:
        # Checked before missing fields: a mistyped name usually causes both errors.
        if name not in hints:
            raise UnknownField(path, name, hints)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        # Both are MISSING, the same object, for a field without a default.
        has_default = field.default is not field.default_factory
        if field.name not in values and not has_default:
            raise UserError(f"{path} has no {field.name}; it must have one")
    return cls(**{name: convert(hints[name], value, join_path(path, name)) for name, value in values.items()})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint with the known word that is closest to an unknown one; "" if none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f'did you mean "{close[0]}"?' if close else ""


def to_plain(values: Any) -> Any:
    """Returns a copy of values from a config file in which each `ConfigDict` is a dictionary."""
    if isinstance(values, ConfigDict):
        values = values.to_dict()
    if isinstance(values, dict):
        return {name: to_plain(value) for name, value in values.items()}
    return type(values)(map(to_plain, values)) if isinstance(values, list | tuple) else values


def convert(hint: Any, value: Any, path: str) -> Any:
    """Converts a value to an annotated type.

    Args:
      hint: type annotation, including unions, literals, tuples and dataclasses.
      value: plain value.
      path: dotted name of the field, for error messages.

    Raises:
      UserError: if the value has another type.
    """
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    options = union_members(hint)
    for option in options:
        if typing.get_origin(option) is tuple:
            hints = _item_hints(option, value)
            if hints is not None:
                pairs = zip(hints, cast(tuple, value), strict=True)
                return tuple(convert(hint, item, _item_path(path, item)) for hint, item in pairs)
        elif _has_type(option, value):
            return float(value) if option is float else value
    raise UserError(f"{path} is {value!r}; it must be {describe_types(options)}")


def _has_type(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    # bool is a subclass of int in Python. In a config, True for a number is a mistake.
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, hint)


def dotted_items(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns all values with their dotted names; an item of a list of sections is named by its `name`."""
    pairs = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            pairs += dotted_items(value, f"{name}.")
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            pairs += [pair for item in value for pair in dotted_items(item, f"{name}.{item.name}.")]
        else:
            pairs.append((name, value))
    return pairs


def field_paths(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields, except those in lists of sections."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from field_paths(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def describe_types(options: tuple[Any, ...]) -> str:
    """Describes the allowed types of a value."""
    words = []
    for option in options:
        if typing.get_origin(option) is Literal:
            words += [f'"{choice}"' for choice in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            words.append(f"a list with {_describe_items(typing.get_args(option))}")
        else:
            words.append(_WORDS.get(option, "a section"))
    return " or ".join(words)


_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False",
          type(None): "None", dict: "a section"}  # fmt: skip


def join_path(path: str, name: str) -> str:
    """Returns the dotted name of a field in a section."""
    return f"{path}.{name}" if path else name


def _describe_items(hints: tuple[Any, ...]) -> str:
    if hints[-1] is Ellipsis:
        return f"{describe_types(hints[:1])} for each item"
    return " and ".join(describe_types((hint,)) for hint in hints)


def _item_hints(hint: Any, value: Any) -> list[Any] | None:
    """Returns the types of a tuple's items; None if `value` is not a list of that length."""
    hints = typing.get_args(hint)
    if not isinstance(value, list | tuple):
        return None
    if hints[-1] is Ellipsis:
        return [hints[0]] * len(value)
    return list(hints) if len(hints) == len(value) else None


def _item_path(path: str, item: Any) -> str:
    """Returns the path of a list item by its name, if it has one."""
    return join_path(path, str(item["name"])) if isinstance(item, dict) and "name" in item else path


def union_members(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union; for any other type, the type itself."""
    # `int | None` is a types.UnionType, Optional[int] a typing.Union.
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)
