"""Config fields and values that have been renamed, so that earlier runs and checkpoints stay readable.

A run's config.json and the record in each checkpoint contain every field and value by the name that it had
when they were written. `use_current_names` is applied where those files are read, and nowhere else: a user
who types an old name gets an error with the new one.
"""

from typing import Any

RENAMED_FIELDS = {
    "train.stop_after_skips": "train.max_consecutive_skips",
    "watch.compare_every": "watch.replica_check_every",
    "watch.least_seconds": "watch.min_seconds",
    "watch.most_spikes": "watch.max_rollbacks",
    "watch.starved_lines": "watch.expert_alert_lines",
    "watch.times_slowest": "watch.timeout_factor",
}
"""Current dotted name by old dotted name. The section is the same: no field has moved between sections."""

RENAMED_VALUES = {
    "train.on_failed_save": {"go_on": "continue"},
    "watch.on_spike": {"go_back": "rollback", "tell": "warn"},
}
"""Current value by old value, for each field with renamed values, by the field's current dotted name."""


def use_current_names(values: dict) -> dict:
    """A copy of a config's plain values in which renamed fields and values have their current names.

    Args:
      values: sections of fields, as JSON has them. Names that are already current, and values that are not
        sections, are left as they are for the config's own checks.
    """
    return {
        section: dict(_current_item(section, field, value) for field, value in fields.items())
        if isinstance(fields, dict)
        else fields
        for section, fields in _with_base_dtype(values).items()
    }


def _with_base_dtype(values: dict) -> dict:
    """Adds the type of frozen weights to a run with adapters from before the field existed: float32."""
    lora = values.get("lora")
    if not isinstance(lora, dict) or not lora.get("rank") or "base_dtype" in lora:
        return values
    return values | {"lora": lora | {"base_dtype": "float32"}}


def current_value(path: str, value: Any) -> Any:
    """The current name of a field's value; the value itself if it has not been renamed."""
    renamed = RENAMED_VALUES.get(path, {})
    # Values of the wrong type may not be hashable; the config's own checks report them.
    return renamed.get(value, value) if isinstance(value, str) else value


def _current_item(section: str, field: str, value: Any) -> tuple[str, Any]:
    # An unknown name is returned unchanged, and is reported when the config is built.
    path = RENAMED_FIELDS.get(f"{section}.{field}", f"{section}.{field}")
    return path.rpartition(".")[2], current_value(path, value)
