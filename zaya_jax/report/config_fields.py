"""Fields of the configs of several runs, and their differences."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RUN_FIELDS = frozenset({"run_folder"})
"""Fields that always differ between runs."""
MISSING = "–"  # noqa: RUF001 (a dash, as tables have it)
"""Value of a field that a run's version does not have, or of a phase that it does not have."""


@dataclasses.dataclass(frozen=True)
class FieldValues:
    """A field of the configs of several runs.

    Attributes:
      name: name with its section, "optimizer.learning_rate", and its phase, "phases.decay.steps".
      values: values as text, in the order of the runs.
    """

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs have different values, except for fields that always differ."""
        return len(set(self.values)) > 1 and self.name not in RUN_FIELDS


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> list[FieldValues]:
    """Returns all fields of the configs, in the order of their first occurrence."""
    flat = [dict(_fields(config, "")) for config in configs]
    names = dict.fromkeys(name for fields in flat for name in fields)
    return [FieldValues(name, tuple(fields.get(name, MISSING) for fields in flat)) for name in names]


def _fields(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        path = f"{section}{name}"
        if isinstance(value, dict):
            yield from _fields(value, f"{path}.")
        elif named := _by_name(value):
            # By name rather than index: an additional phase must not make all later phases differ.
            yield from _fields(named, f"{path}.")
        else:
            # Strings have no quotation marks, as on the command line.
            yield path, value if isinstance(value, str) else json.dumps(value)


def _by_name(value: Any) -> dict[str, Any] | None:
    """Elements of a list of named parts, such as phases and mixtures, by name; None for other values."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return None
    # Duplicate names cannot be keys: such a list is compared as a whole.
    parts = {str(each["name"]): {k: v for k, v in each.items() if k != "name"} for each in value}
    return parts if len(parts) == len(value) else None
