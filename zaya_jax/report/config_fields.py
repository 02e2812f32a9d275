"""Configs of runs as fields with values, and those in which they differ."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OF_A_RUN = frozenset({"run_folder"})
"""Fields in which runs differ because they are several."""
NOT_THERE = "–"  # noqa: RUF001 (a dash, as tables have it)
"""Of a field that a run's version did not have, or a phase that it does not have."""


@dataclasses.dataclass(frozen=True)
class FieldValues:
    """A field of the configs of several runs.

    Attributes:
      name: with its section, "optimizer.learning_rate", and its phase, "phases.decay.steps".
      values: as text, in the order of the runs.
    """

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs have different values, and not by being several runs."""
        return len(set(self.values)) > 1 and self.name not in OF_A_RUN


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> list[FieldValues]:
    """All fields of some configs, in the order in which the first one that has them names them."""
    flat = [dict(_fields(config, "")) for config in configs]
    names = dict.fromkeys(name for fields in flat for name in fields)
    return [FieldValues(name, tuple(fields.get(name, NOT_THERE) for fields in flat)) for name in names]


def _fields(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        path = f"{section}{name}"
        if isinstance(value, dict):
            yield from _fields(value, f"{path}.")
        elif named := _by_name(value):
            # By name and not by number: a phase that one run has more must not make all behind it differ.
            yield from _fields(named, f"{path}.")
        else:
            yield path, value if isinstance(value, str) else json.dumps(value)


def _by_name(value: Any) -> dict[str, Any] | None:
    """Parts of a config that have names, as phases and mixtures have; None of other lists."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return None
    parts = {str(each["name"]): {k: v for k, v in each.items() if k != "name"} for each in value}
    return parts if len(parts) == len(value) else None
