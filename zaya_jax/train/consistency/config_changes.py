"""Record of config changes of resumed runs: `changes.jsonl` in the run folder, one line per change."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterable

from zaya_jax.config import FieldChange
from zaya_jax.fields import build
from zaya_jax.files import durable
from zaya_jax.files.json_files import parse_object
from zaya_jax.run_folder.names import CHANGES_FILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedChange:
    """A change of a run's config.

    Attributes:
      step: step of the checkpoint from which the run was resumed; 0 without one.
      written: time of the change, UTC in ISO 8601 format.
      has_left_its_course: whether the change affects the results of later steps.
      fields: old and new value of each changed field, by dotted name.
    """

    step: int
    written: str
    has_left_its_course: bool
    fields: dict


def record_change(
    run_folder: pathlib.Path, changed: Iterable[FieldChange], *, step: int, has_left_its_course: bool
) -> None:
    """Appends a change atomically."""
    change = RecordedChange(
        step=step,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        has_left_its_course=has_left_its_course,
        fields={each.name: [each.old, each.new] for each in changed},
    )
    path = run_folder / CHANGES_FILE
    # Rewritten instead of appended: half a line after a kill would make the whole file unreadable.
    before = path.read_text() if path.exists() else ""
    durable.write(path, f"{before}{json.dumps(dataclasses.asdict(change))}\n")


def read_changes(run_folder: str | pathlib.Path) -> list[RecordedChange]:
    """Returns all changes of a run, oldest first.

    Raises:
      UserError: for a line that is not a recorded change.
    """
    path = pathlib.Path(run_folder) / CHANGES_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    return [
        build(RecordedChange, parse_object(line, f"{path}:{n}"), "") for n, line in enumerate(lines, start=1)
    ]
