"""Frozen dataclasses from plain values and back: types are checked, each mistake has its sentence.

Nothing here imports jax, and nothing knows what the values mean; `zaya_jax.config` does.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar, cast

from ml_collections import ConfigDict

T = TypeVar("T")


class UnknownField(ValueError):
    """A name that no field of a section has.

    Attributes:
      section: its dotted name.
      name: that it does not have.
      subject: how a sentence about it begins.
    """

    def __init__(self, section: str, name: str, known: Iterable[str]):
        self.section, self.name = section, name
        self.subject = f'there is no config field "{join_path(section, name)}"'
        hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
        super().__init__(f"{self.subject}; {hint}")


def build(cls: type[T], values: Any, path: str) -> T:
    """A dataclass from a dictionary of its fields, at any depth.

    Args:
      cls: whose annotations say what each value must be.
      values: the fields that are not to have their defaults.
      path: dotted name of the section, for sentences.

    Raises:
      ValueError: for an unknown or missing field, a value of the wrong type, or one that `cls` refuses.
    """
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict):
        raise ValueError(
            f"{path or 'the config'} is {values!r}; it must be a section with {', '.join(hints)}"
        )
    for name in values:
        if name not in hints:
            raise UnknownField(path, name, hints)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        has_default = field.default is not field.default_factory
        if field.name not in values and not has_default:
            raise ValueError(f"{path} has no {field.name}; it must have one")
    return cls(**{name: convert(hints[name], value, join_path(path, name)) for name, value in values.items()})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a word that nobody knows: the closest that is known; "" without one."""
    close = difflib.get_close_matches(word, known, n=1)
    return f'did you mean "{close[0]}"?' if close else ""


def to_plain(values: Any) -> Any:
    """A copy in dictionaries, lists and tuples, where config files have `ConfigDict`s too."""
    if isinstance(values, ConfigDict):
        values = values.to_dict()
    if isinstance(values, dict):
        return {name: to_plain(value) for name, value in values.items()}
    return type(values)(map(to_plain, values)) if isinstance(values, list | tuple) else values


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type that `hint` asks for.

    Raises:
      ValueError: when it is of another.
    """
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_optional(hint) else (hint,)
    for option in options:
        if option is type(None):
            if value is None:
                return None
        elif typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            hints = _item_hints(option, value)
            if hints is not None:
                return tuple(
                    convert(h, v, _item_path(path, v)) for h, v in zip(hints, cast(tuple, value), strict=True)
                )
        # True and False are whole numbers to Python; in a config they are a mistake for one.
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif isinstance(value, option):
            return value
    raise ValueError(f"{path} is {value!r}; it must be {describe_types(options)}")


def dotted_items(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """All values by their dotted names; items of a list of sections go by their names."""
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
    """Dotted names of all fields that have one place: those in lists of sections have none."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from field_paths(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def describe_types(options: tuple[Any, ...]) -> str:
    """What a value must be, in words."""
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
    """The dotted name of a field in a section."""
    return f"{path}.{name}" if path else name


def _describe_items(hints: tuple[Any, ...]) -> str:
    if hints[-1] is Ellipsis:
        return f"{describe_types(hints[:1])} at each place"
    return " and ".join(describe_types((hint,)) for hint in hints)


def _item_hints(hint: Any, value: Any) -> list[Any] | None:
    """The types of a tuple's items; None where `value` is no list of that length."""
    hints = typing.get_args(hint)
    if not isinstance(value, list | tuple):
        return None
    if hints[-1] is Ellipsis:
        return [hints[0]] * len(value)
    return list(hints) if len(hints) == len(value) else None


def _item_path(path: str, item: Any) -> str:
    """An item that has a name goes by it."""
    return join_path(path, str(item["name"])) if isinstance(item, dict) and "name" in item else path


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union
