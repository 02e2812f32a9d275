"""Checks of field values that sections share, each with its error message."""

import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from zaya_jax.errors import UserError
from zaya_jax.fields import describe_types, union_members


def require(condition: bool, message: str) -> None:
    """Raises a `UserError` with the message unless the condition is true."""
    if not condition:
        raise UserError(message)


def require_positive(section: str, config: Any, *names: str) -> None:
    """Checks that the named fields are above 0, or None where their types allow it."""
    _require_each(section, config, names, lambda value: value > 0, "above 0")


def require_not_negative(section: str, config: Any, *names: str) -> None:
    """Checks that the named fields are 0 or above, or None where their types allow it."""
    _require_each(section, config, names, lambda value: value >= 0, "0 or above")


def require_below_one(section: str, config: Any, *names: str) -> None:
    """Checks that the named fields are at least 0 and below 1, or None where their types allow it."""
    _require_each(section, config, names, lambda value: 0 <= value < 1, "from 0 up to, not including, 1")


def _require_each(
    section: str, config: Any, names: Sequence[str], rule: Callable[[Any], bool], wanted: str
) -> None:
    hints = typing.get_type_hints(type(config))
    for name in names:
        value = getattr(config, name)
        or_none = ", or None" if type(None) in typing.get_args(hints[name]) else ""
        require(value is None or rule(value), f"{section}.{name} is {value}; it must be {wanted}{or_none}")


def require_choices(section: str, config: Any) -> None:
    """Checks every field whose type is a `Literal`."""
    for name, hint in typing.get_type_hints(type(config)).items():
        # Handles both `Literal[...]` and `Literal[...] | None`.
        options = union_members(hint)
        choices = [c for o in options if typing.get_origin(o) is Literal for c in typing.get_args(o)]
        value = getattr(config, name)
        # Types are only checked when values are read from files or options; configs that are built in code
        # get here without that check.
        if choices and value is not None and value not in choices:
            raise UserError(f"{section}.{name} is {value!r}; it must be {describe_types(options)}")


def require_seed(section: str, seed: int) -> None:
    """Checks the field `seed` of a section."""
    # The range of grain's shuffle; jax.random.key accepts larger seeds but silently drops their upper bits.
    require(0 <= seed < 2**32, f"{section}.seed is {seed}; it must be from 0 to 2**32 - 1")


def require_name(section: str, name: str) -> None:
    """Checks the name of a phase or a mixture, which must be usable as a part of an option's name."""
    require(
        # Dots would be ambiguous in `--config.phases.NAME.SECTION.FIELD`.
        re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) is not None,
        f'{section} has the name "{name}"; a name must be letters, digits, - and _, and start with a letter',
    )


def require_different(section: str, names: list[str]) -> None:
    """Checks that the names in a list of sections are unique."""
    for name in names:
        require(names.count(name) == 1, f'{section} has "{name}" twice; names must be unique')
