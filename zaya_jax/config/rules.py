"""Rules about a value, each with a sentence for whoever breaks it."""

import re
import typing
from typing import Any, Literal

from zaya_jax.fields import describe_types


def require(condition: bool, message: str) -> None:
    """Raises a ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_positive(section: str, config: Any, *names: str) -> None:
    """Checks that the named fields are above 0."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name} is {value}; it must be above 0")


def require_choices(section: str, config: Any) -> None:
    """Checks every field whose type names its choices."""
    for name, hint in typing.get_type_hints(type(config)).items():
        options = (hint,) if typing.get_origin(hint) is Literal else typing.get_args(hint)
        choices = [c for o in options if typing.get_origin(o) is Literal for c in typing.get_args(o)]
        value = getattr(config, name)
        if choices and value is not None and value not in choices:
            raise ValueError(f"{section}.{name} is {value!r}; it must be {describe_types(options)}")


def require_seed(section: str, seed: int) -> None:
    """Checks the field `seed` of a section."""
    # What grain's shuffle takes; jax.random.key would take more and drop the upper bits.
    require(0 <= seed < 2**32, f"{section}.seed is {seed}; it must be from 0 to 2**32 - 1")


def require_name(section: str, name: str) -> None:
    """Checks a name that an option can spell, as one of a phase or a mixture."""
    require(
        re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) is not None,
        f'{section} has the name "{name}"; a name must be letters, digits, - and _, and begin with a letter',
    )


def require_different(section: str, names: list[str]) -> None:
    """Checks that no name in a list of sections is there twice."""
    for name in names:
        require(names.count(name) == 1, f'{section} has "{name}" twice; each name must be another')
